//! A report as text for a terminal.

use super::human::{self, Table, bytes, decimal, percent, seconds, tokens};
use super::{Report, Row, record};

impl Report {
    pub fn render(&self) -> String {
        let step = self.row.step_time_s.unwrap_or(f64::NAN);
        let record = record::tables(&self.record, step, &self.memory_record);
        let parts = [self.headline(), self.time(), self.communication(), self.memory_table(), self.rests_on(), record];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
    }

    fn headline(&self) -> String {
        let row = &self.row;
        let mut text = format!(
            "{} on {} of {} ({}), stack {}, {}\n{}\n\n",
            human::weighed(&row.model, self.weights.zip(self.active_weights)),
            human::counted(row.gpus, "GPU"),
            row.cluster,
            self.gpu,
            row.stack,
            self.dtype,
            row.what()
        );
        text.push_str(&human::notes(&self.notes));
        if !row.feasible {
            text.push_str(&format!("  does not fit: {}\n\n", row.why));
        }
        let mut table = Table::new("<<<");
        let or = |v: Option<f64>| v.unwrap_or(f64::NAN);
        table.row(["step", &seconds(or(row.step_time_s)), &self.interval()]);
        let mfu = format!("of {}; HFU {}", decimal(self.peak_flops_per_s, "FLOP/s"), percent(or(row.hfu)));
        table.row(["MFU", &percent(or(row.mfu)), &mfu]);
        table.row(["tokens", &format!("{:.0} /s", or(row.tokens_per_s_per_gpu)), "on each GPU"]);
        let flops = format!("on each GPU; the model needs {}", decimal(self.model_flops_per_gpu, "FLOP"));
        table.row(["executed", &decimal(self.executed_flops_per_gpu, "FLOP"), &flops]);
        table.row(["limit", row.limit.as_str()]);
        if let Some(training) = &self.training {
            let more = format!(
                "{} tokens, {:.0} steps; {} GPU-hours; if nothing fails, see foretrain goodput --tokens",
                decimal(training.tokens, "").trim_end(),
                training.steps,
                decimal(training.gpu_hours, "").trim_end()
            );
            table.row(["training", &human::long(training.time_s), &more]);
        }
        text.push_str(&table.render("  "));
        text
    }

    /// The interval of the step, and what it rests on.
    pub fn interval(&self) -> String {
        let [low, high] = self.interval_95_s.map(seconds);
        format!("95 % between {low} and {high}, if software does as planned: {}", self.interval_rests_on)
    }

    /// Where the time of the compute lane goes.
    pub fn time(&self) -> String {
        let step = self.row.step_time_s.unwrap_or(f64::NAN);
        let mut table = Table::new("<>>");
        table.row(["time of a step, mean of the ranks", "time", "share"]);
        for kernel in &self.kernels {
            table.row([format!("  {}", kernel.name), seconds(kernel.seconds), percent(kernel.share)]);
        }
        if self.slowed_s > 1e-9 * step {
            table.row(["  SMs lost to communication".into(), seconds(self.slowed_s), percent(self.slowed_s / step)]);
        }
        for wait in &self.exposed {
            table.row([format!("  waiting for {}", axis(&wait.name)), seconds(wait.seconds), percent(wait.share)]);
        }
        if self.offload_s > 1e-9 * step {
            let share = percent(self.offload_s / step);
            table.row(["  waiting for host memory".into(), seconds(self.offload_s), share]);
        }
        if self.others_s > 1e-9 * step {
            table.row(["  waiting for other ranks".into(), seconds(self.others_s), percent(self.others_s / step)]);
        }
        let host = self.row.host_s.unwrap_or(0.0);
        if host > 1e-9 * step {
            table.row(["  waiting for the host".into(), seconds(host), percent(host / step)]);
        }
        table.row(["  step".into(), seconds(step), percent(1.0)]);
        table.render("")
    }

    pub fn communication(&self) -> String {
        if self.communication_busy.is_empty() && self.offload_busy_s == 0.0 {
            return "communication: none\n".into();
        }
        let mut table = Table::new("<>>");
        table.row(["communication", "busy", "exposed"]);
        let mut others = "";
        for busy in &self.communication_busy {
            let exposed = self.exposed.iter().find(|e| e.name == busy.name).map_or(0.0, |e| e.seconds);
            // Rounding and the last few microseconds apart.
            if exposed > 1.02 * busy.seconds + 1e-6 {
                others = "  exposed for longer than busy: some wait for their turn, or for ranks that such messages have held up\n";
            }
            table.row([format!("  {}", axis(&busy.name)), seconds(busy.seconds), seconds(exposed)]);
        }
        let sent = |b: Option<f64>| decimal(b.unwrap_or(0.0), "B");
        let mut copied = String::new();
        if self.offload_busy_s > 0.0 {
            table.row(["  host (copies, CPU)".into(), seconds(self.offload_busy_s), seconds(self.offload_s)]);
            copied = format!("  and copies {} to and from the host's memory\n", sent(self.row.bytes_host));
        }
        let (up, out) = (sent(self.row.bytes_scale_up), sent(self.row.bytes_scale_out));
        format!("{}  each rank sends {up} inside its node and {out} out of it\n{others}{copied}", table.render(""))
    }

    pub fn memory_table(&self) -> String {
        let m = &self.memory;
        let mut table = Table::new("<>");
        table.row(["memory of a rank at its fullest", ""]);
        for (kind, size) in m.at_the_fullest.iter().filter(|(_, size)| *size > 0) {
            table.row([format!("  {kind}"), bytes(*size as f64)]);
        }
        table.row(["  gaps between them".into(), bytes(m.gaps as f64)]);
        if m.buffers > 0 {
            table.row([format!("  buffers of {}", m.buffers_of), bytes(m.buffers as f64)]);
        }
        table.row(["  reserved by the stack".into(), bytes(m.reserved as f64)]);
        table.row([format!("  needed, of {}", bytes(m.capacity as f64)), bytes(m.needed() as f64)]);
        if m.host > 0 {
            table.row(["  in the host's memory".into(), bytes(m.host as f64)]);
        }
        table.render("")
    }

    pub fn rests_on(&self) -> String {
        let mut table = Table::new("<>");
        table.row(["what the times of kernels and links rest on", "share"]);
        for part in &self.provenance {
            table.row([format!("  {}", meaning(&part.name)), percent(part.share)]);
        }
        table.render("")
    }
}

impl Row {
    /// What tensors need, of the room that they have: what the stack reserves and libraries set aside is taken off that.
    /// Nothing where no plan was laid out.
    pub fn memory(&self) -> String {
        let Some(peak) = self.peak_mem_bytes.map(|b| bytes(b as f64)) else { return String::new() };
        self.mem_room_bytes.map_or_else(|| peak.clone(), |room| format!("{peak} of {}", bytes(room as f64)))
    }

    /// The configuration in one line.
    pub fn what(&self) -> String {
        let length = match tokens(self.seq_len) {
            short if short.ends_with(char::is_numeric) => short,
            short => format!("{} ({short})", self.seq_len),
        };
        let more = [("tp", self.tp), ("pp", self.pp), ("vp", self.vp), ("ep", self.ep)];
        let more = more.into_iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!(", {name} {n}"));
        let options = if self.chooses() { format!(", options {}", self.options) } else { String::new() };
        format!(
            "seq_len {length}, global_batch {}, micro_batch {}, dp {}, ulysses {}, ring {}{}, zero {}, recompute {}{options} \
             ({})",
            self.global_batch,
            self.micro_batch,
            self.dp,
            self.ulysses,
            self.ring,
            more.collect::<String>(),
            self.zero,
            self.recompute,
            self.strategy
        )
    }

    fn chooses(&self) -> bool {
        !["", "default"].contains(&self.options.as_str())
    }

    /// How the sequence is split, as the plots call it, and the experts are shared.
    pub fn way(&self) -> String {
        let more = [("pp", self.pp), ("vp", self.vp), ("tp", self.tp), ("ep", self.ep)]
            .into_iter()
            .filter(|(_, degree)| *degree > 1);
        let mut parts: Vec<String> = more.map(|(name, degree)| format!("{name} {degree}")).collect();
        match (self.ulysses, self.ring) {
            (1, 1) if parts.is_empty() => parts.push("no split".into()),
            (1, 1) => {}
            (u, 1) => parts.push(format!("ulysses {u}")),
            (1, r) => parts.push(format!("ring {r}")),
            (u, r) => parts.push(format!("usp {u} x {r}")),
        }
        if self.chooses() {
            parts.push(self.options.clone());
        }
        parts.join(", ")
    }
}

pub(super) fn axis(name: &str) -> &str {
    match name {
        "pp" => "pp (pipeline)",
        "dp" => "dp (gradients, weights)",
        "cp" => "cp (ring)",
        "up" => "up (ulysses)",
        "tp" => "tp (tensor)",
        "ep" => "ep (experts' rows)",
        "edp" => "edp (experts' gradients, weights)",
        other => other,
    }
}

fn meaning(provenance: &str) -> &str {
    match provenance {
        "measured" => "measured",
        "interpolated" => "interpolated between measurements",
        "extrapolated" => "extrapolated beyond measurements",
        "assumed" => "assumed: at least one number is a guess",
        other => other,
    }
}
