//! A device that is told what GPUs are told, and does it on the CPU: each stream in order, and of what different streams
//! could do next any, at random, as far as events allow. Kernels are run by the emulator, products here.
#![allow(dead_code)]

pub mod board;

use super::cuda_emulator::Emulator;
use board::{Open, Seat};
use foretrain::error::{Error, Result};
use foretrain::exec::cuda::blas;
use foretrain::exec::cuda::calls::{Call, Communicator};
use foretrain::exec::cuda::device::{Device, EventId, FunctionId, GraphId, Operands, Size, StreamId};
use foretrain::exec::cuda::lower::{Gemm, Launch, MOST_SHARED};
use foretrain::plan::Dtype;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;

/// What was handed over while it was only noted.
enum Noted {
    Wait(EventId),
    Record(EventId),
    Deed(Deed),
}

enum Deed {
    /// Until the event has passed as often as it was recorded by then.
    Wait(EventId, u64),
    Record(EventId, u64),
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
    },
    Launch {
        function: FunctionId,
        size: Size,
        words: Vec<u64>,
    },
    Gemm(Gemm, Operands),
    /// With other processes.
    Calls(Communicator, Vec<Call>),
    /// The same, under way.
    Open(Open),
}

#[derive(Default, Clone)]
struct Event {
    gpu: u32,
    recorded: u64,
    passed: u64,
    at: f64,
}

pub struct Double {
    gpus: u32,
    bytes: u64,
    free: Vec<u64>,
    /// By connections.
    taken: u64,
    emulator: Emulator,
    streams: Vec<(u32, VecDeque<Deed>)>,
    events: Vec<Event>,
    functions: Vec<(PathBuf, &'static str)>,
    rng: ChaCha8Rng,
    /// Commands done so far: the time, in microseconds.
    clock: u64,
    /// Bytes of shared memory that a block may have.
    pub shared: u64,
    /// The stream that is captured, and the notes.
    capturing: Option<(StreamId, Vec<(StreamId, Noted)>)>,
    graphs: Vec<Vec<(StreamId, Noted)>>,
    /// Where other processes are met.
    pub seat: Option<Seat>,
    /// Bytes that each connection with them takes.
    pub connection: u64,
    /// Whether connections, and products as their algorithms are chosen, have to be known before the host first fills memory
    /// and the first event is recorded: then those that come up later.
    pub early: bool,
    warm: HashSet<String>,
    begun: bool,
    pub cold: Vec<String>,
    /// Why one of them has failed, if one has.
    pub failed: Box<dyn Fn() -> Option<String>>,
    /// A kernel that fails, as one that reads where nothing is.
    pub broken: Option<&'static str>,
    /// Products so far, those of them with an operand that has something other than numbers in it, and those with one of which
    /// a third is zeros or more.
    pub products: [usize; 3],
    /// Seconds of each wait that was handed over.
    pub rests: Vec<f64>,
    made: std::time::Instant,
}

impl Double {
    pub fn new(gpus: u32, bytes: u64, seed: u64) -> Double {
        Double {
            gpus,
            bytes,
            free: vec![bytes; gpus as usize],
            taken: 0,
            emulator: Emulator::new(),
            streams: vec![],
            events: vec![],
            functions: vec![],
            rng: ChaCha8Rng::seed_from_u64(seed),
            clock: 0,
            shared: MOST_SHARED,
            capturing: None,
            graphs: vec![],
            seat: None,
            connection: 0,
            early: false,
            warm: HashSet::new(),
            begun: false,
            cold: vec![],
            failed: Box::new(|| None),
            broken: None,
            products: [0; 3],
            rests: vec![],
            made: std::time::Instant::now(),
        }
    }

    /// Memory that nobody has taken.
    pub fn free(&self, gpu: u32) -> u64 {
        self.free[gpu as usize]
    }

    fn idle(&self, what: &str) {
        assert!(self.streams.iter().all(|(_, deeds)| deeds.is_empty()), "{what} while streams are busy");
    }

    fn hand_over(&mut self, stream: StreamId, deed: Deed) -> Result<()> {
        if let Some((_, notes)) = &mut self.capturing {
            notes.push((stream, Noted::Deed(deed)));
            return Ok(());
        }
        self.streams[stream as usize].1.push_back(deed);
        Ok(())
    }

    /// A group of calls that a stream has come to is seen by all others from then on.
    fn put_up(&mut self) {
        for (_, deeds) in &mut self.streams {
            let Some(Deed::Calls(lane, calls)) = deeds.front() else { continue };
            let seat = self.seat.as_mut().unwrap();
            self.taken += self.connection * seat.connect(*lane, calls);
            let open = seat.put(*lane, calls, |at, bytes| self.emulator.read(at, bytes));
            deeds[0] = Deed::Open(open);
        }
    }

    fn can(&self, deeds: &VecDeque<Deed>) -> bool {
        match deeds.front() {
            Some(Deed::Open(open)) => self.seat.as_ref().unwrap().is_there(open),
            Some(Deed::Wait(event, times)) => self.events[*event as usize].passed >= *times,
            other => other.is_some(),
        }
    }

    fn obey(&mut self, deed: Deed) -> Result<()> {
        self.clock += 1;
        match deed {
            Deed::Wait(..) => {}
            Deed::Record(event, times) => {
                let event = &mut self.events[event as usize];
                (event.passed, event.at) = (times, self.clock as f64 * 1e-6);
            }
            Deed::Copy { to, from, bytes } => {
                let data = self.emulator.read(from, bytes);
                self.emulator.write(to, &data);
            }
            Deed::Launch { function, size, words } => {
                let (program, kernel) = self.functions[function as usize].clone();
                let done = self.emulator.launch(&program, kernel, (size.grid, size.shared), &words);
                done.map_err(|e| Error::device("launch a kernel", e))?;
            }
            Deed::Gemm(gemm, at) => self.products(&gemm, at),
            Deed::Calls(..) => unreachable!("put up before"),
            Deed::Open(open) => {
                for (at, data) in self.seat.as_ref().unwrap().take(&open) {
                    self.emulator.write(at, &data);
                }
            }
        }
        Ok(())
    }

    fn numbers(&self, at: u64, count: u64, dtype: Dtype) -> Vec<f32> {
        let bytes = self.emulator.read(at, count * dtype.size());
        match dtype {
            Dtype::Bf16 => bytes.chunks(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect(),
            Dtype::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::U8 => bytes.iter().map(|&code| of_code(code)).collect(),
            other => panic!("no product of {other:?} here"),
        }
    }

    fn products(&mut self, gemm: &Gemm, mut at: Operands) {
        let [m, n, k] = gemm.shape;
        for _ in 0..gemm.count {
            self.product(gemm, at);
            at.a += m * k * gemm.dtypes[0].size();
            at.b += k * n * gemm.dtypes[1].size();
            at.c += m * n * gemm.dtypes[2].size();
        }
    }

    fn product(&mut self, gemm: &Gemm, at: Operands) {
        let ([m, n, k], [a_t, b_t]) = (gemm.shape.map(|x| x as usize), gemm.transposed);
        let count = |x: usize, y: usize| (x * y) as u64;
        let mut a = self.numbers(at.a, count(m, k), gemm.dtypes[0]);
        let mut b = self.numbers(at.b, count(k, n), gemm.dtypes[1]);
        assert_eq!(at.scales.is_some(), gemm.dtypes[0] == Dtype::U8);
        if let Some([of_a, of_b]) = at.scales {
            assert_eq!(gemm.transposed, [false, true], "codes run along k");
            for (operand, rows, scales) in [(&mut a, m, of_a), (&mut b, n, of_b)] {
                let scales = self.numbers(scales, count(rows, k.div_ceil(128)), Dtype::F32);
                operand.iter_mut().enumerate().for_each(|(i, x)| *x *= scales[i % k / 128 * rows + i / k]);
            }
        }
        self.products[0] += 1;
        self.products[1] += usize::from(!a.iter().chain(&b).all(|x| x.is_finite()));
        let empty = |all: &[f32]| 3 * all.iter().filter(|x| **x == 0.0).count() >= all.len();
        self.products[2] += usize::from(empty(&a) || empty(&b));
        let old = self.numbers(at.c, count(m, n), gemm.dtypes[2]);
        let bias = at.bias.map(|bias| self.numbers(bias, n as u64, gemm.dtypes[2]));
        assert_eq!(bias.is_some(), gemm.bias);
        let mut out = vec![];
        for i in 0..m {
            for j in 0..n {
                let of_a = |l: usize| if a_t { a[l * m + i] } else { a[i * k + l] };
                let of_b = |l: usize| if b_t { b[j * k + l] } else { b[l * n + j] };
                let mut sum = at.factors.product * (0..k).map(|l| of_a(l) * of_b(l)).sum::<f32>();
                sum += if gemm.accumulate { at.factors.old * old[i * n + j] } else { 0.0 };
                sum += bias.as_ref().map_or(0.0, |bias| bias[j]);
                match gemm.dtypes[2] {
                    Dtype::Bf16 => {
                        let bits = sum.to_bits();
                        out.extend((((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes());
                    }
                    _ => out.extend(sum.to_le_bytes()),
                }
            }
        }
        self.emulator.write(at.c, &out);
    }
}

/// The same once more.
fn again(deed: &Deed) -> Deed {
    match deed {
        Deed::Copy { to, from, bytes } => Deed::Copy { to: *to, from: *from, bytes: *bytes },
        Deed::Launch { function, size, words } => {
            Deed::Launch { function: *function, size: *size, words: words.clone() }
        }
        Deed::Gemm(gemm, at) => Deed::Gemm(gemm.clone(), *at),
        _ => panic!("no graph has that"),
    }
}

/// The number of an E4M3 code.
fn of_code(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 128 == 0 { size } else { -size }
}

impl Device for Double {
    fn name(&self, _gpu: u32) -> String {
        "a double".into()
    }

    fn shared(&self, _gpu: u32) -> u64 {
        self.shared
    }

    /// A hundred watts, whatever it does.
    fn energy(&mut self, _gpu: u32) -> Option<f64> {
        Some(100.0 * self.made.elapsed().as_secs_f64())
    }

    /// In place of clocks: whether it is at something.
    fn conditions(&mut self, _gpu: u32) -> Option<String> {
        let under_way: usize = self.streams.iter().map(|(_, deeds)| deeds.len()).sum();
        Some(if under_way > 0 { "busy" } else { "idle" }.into())
    }

    fn power_limit(&mut self, _gpu: u32) -> Option<f64> {
        Some(700.0)
    }

    fn memory(&mut self, gpu: u32) -> Result<[u64; 2]> {
        Ok([self.free[gpu as usize].saturating_sub(self.taken); 2])
    }

    fn allocate(&mut self, gpu: u32, bytes: u64) -> Result<u64> {
        let free = &mut self.free[gpu as usize];
        *free = free.checked_sub(bytes).ok_or_else(|| Error::device("allocate memory", "out of memory"))?;
        Ok(self.emulator.allocate(bytes))
    }

    fn clear(&mut self) -> Result<()> {
        self.synchronize()?;
        self.streams.clear();
        self.events.clear();
        (self.free, self.emulator) = (vec![self.bytes; self.gpus as usize], Emulator::new());
        Ok(())
    }

    fn write(&mut self, _gpu: u32, at: u64, data: &[u8]) -> Result<()> {
        self.idle("the host writes");
        if let Some(seat) = self.seat.as_mut().filter(|_| self.early) {
            seat.closed = true;
        }
        self.emulator.write(at, data);
        Ok(())
    }

    fn read(&mut self, _gpu: u32, at: u64, bytes: u64) -> Result<Vec<u8>> {
        self.idle("the host reads");
        Ok(self.emulator.read(at, bytes))
    }

    fn stream(&mut self, gpu: u32) -> Result<StreamId> {
        assert!(gpu < self.gpus);
        self.streams.push((gpu, VecDeque::new()));
        Ok(self.streams.len() as StreamId - 1)
    }

    fn event(&mut self, gpu: u32) -> Result<EventId> {
        self.events.push(Event { gpu, ..Event::default() });
        Ok(self.events.len() as EventId - 1)
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        if let Some((_, notes)) = &mut self.capturing {
            let known = notes.iter().any(|(_, noted)| matches!(noted, Noted::Record(e) if *e == event));
            assert!(known, "a graph waits for event {event}, which is recorded outside of it");
            notes.push((stream, Noted::Wait(event)));
            return Ok(());
        }
        let recorded = self.events[event as usize].recorded;
        assert!(recorded > 0, "stream {stream} waits for event {event}, which nobody has recorded");
        self.hand_over(stream, Deed::Wait(event, recorded))
    }

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        if let Some((_, notes)) = &mut self.capturing {
            notes.push((stream, Noted::Record(event)));
            return Ok(());
        }
        self.begun = true;
        let of = &mut self.events[event as usize];
        assert_eq!(of.gpu, self.streams[stream as usize].0, "an event is recorded on a stream of another GPU");
        of.recorded += 1;
        let times = of.recorded;
        self.hand_over(stream, Deed::Record(event, times))
    }

    fn copy(&mut self, stream: StreamId, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.hand_over(stream, Deed::Copy { to, from, bytes })
    }

    fn load(&mut self, _gpu: u32, launch: &Launch) -> Result<FunctionId> {
        let program = self.emulator.load(launch);
        let known = self.functions.iter().position(|(of, name)| *of == program && *name == launch.kernel);
        Ok(known.unwrap_or_else(|| {
            self.functions.push((program, launch.kernel));
            self.functions.len() - 1
        }) as FunctionId)
    }

    fn launch(&mut self, stream: StreamId, function: FunctionId, size: Size, words: &[u64]) -> Result<()> {
        if self.broken == Some(self.functions[function as usize].1) {
            return Err(Error::device("launch a kernel", "CUDA: an illegal memory access"));
        }
        assert!(u64::from(size.shared) <= self.shared, "{} bytes of shared memory", size.shared);
        assert!(size.grid[0] < 1 << 31 && size.grid[1].max(size.grid[2]) < 1 << 16, "a grid of {:?}", size.grid);
        self.hand_over(stream, Deed::Launch { function, size, words: words.to_vec() })
    }

    /// Time is none of the double's.
    fn rest(&mut self, stream: StreamId, seconds: f64) -> Result<()> {
        assert!(self.capturing.is_none() && seconds >= 0.0 && (stream as usize) < self.streams.len());
        self.rests.push(seconds);
        Ok(())
    }

    fn gemm(&mut self, stream: StreamId, gemm: &Gemm, at: Operands) -> Result<()> {
        let kind = format!("{:?}", blas::shape(gemm, at));
        if self.warm.insert(kind.clone()) && self.begun && self.early {
            self.cold.push(kind);
        }
        self.hand_over(stream, Deed::Gemm(gemm.clone(), at))
    }

    fn cache(&self, _gpu: u32) -> u64 {
        1 << 20
    }

    fn capture(&mut self, stream: StreamId) -> Result<()> {
        assert!(self.capturing.is_none());
        self.capturing = Some((stream, vec![]));
        Ok(())
    }

    /// Every stream that took part must have begun after the first, and be waited for by it.
    fn captured(&mut self, stream: StreamId) -> Result<GraphId> {
        let (first, notes) = self.capturing.take().expect("a capture");
        assert_eq!(first, stream);
        for (s, noted) in &notes {
            if *s == first {
                continue;
            }
            let own = |n: &&(StreamId, Noted)| n.0 == *s;
            assert!(
                matches!(notes.iter().find(own), Some((_, Noted::Wait(_)))),
                "stream {s} does not begin with the graph"
            );
            let Some((_, Noted::Record(last))) = notes.iter().rev().find(own) else {
                panic!("stream {s} is not joined: {}", matches!(noted, Noted::Wait(_)))
            };
            let joins = |n: &(StreamId, Noted)| n.0 == first && matches!(n.1, Noted::Wait(e) if e == *last);
            assert!(notes.iter().any(joins), "stream {s} is not joined");
        }
        self.graphs.push(notes);
        Ok(self.graphs.len() as GraphId - 1)
    }

    fn replay(&mut self, _stream: StreamId, graph: GraphId) -> Result<()> {
        let notes = std::mem::take(&mut self.graphs[graph as usize]);
        for (stream, noted) in &notes {
            match noted {
                Noted::Wait(event) => self.wait(*stream, *event)?,
                Noted::Record(event) => self.record(*stream, *event)?,
                Noted::Deed(deed) => self.hand_over(*stream, again(deed))?,
            }
        }
        self.graphs[graph as usize] = notes;
        Ok(())
    }

    fn communicator(&mut self, lane: Communicator, rank: u32, members: &[u32]) -> Result<()> {
        let seat = self.seat.as_mut().expect("a seat among the others");
        assert_eq!(seat.rank, rank);
        if !members.is_empty() {
            seat.join(lane, members);
        }
        Ok(())
    }

    fn call(&mut self, stream: StreamId, lane: Communicator, calls: &[Call]) -> Result<()> {
        self.hand_over(stream, Deed::Calls(lane, calls.to_vec()))
    }

    fn synchronize(&mut self) -> Result<()> {
        loop {
            self.put_up();
            let ready: Vec<usize> = (0..self.streams.len()).filter(|&s| self.can(&self.streams[s].1)).collect();
            let waits = |deeds: &VecDeque<Deed>| matches!(deeds.front(), Some(Deed::Open(_)));
            if ready.is_empty() && self.streams.iter().any(|(_, deeds)| waits(deeds)) {
                if let Some(why) = (self.failed)() {
                    return Err(Error::device("another rank", why));
                }
                self.seat.as_ref().unwrap().wait();
                continue;
            }
            if ready.is_empty() {
                self.idle("streams wait for each other");
                return Ok(());
            }
            let pick = ready[self.rng.random_range(0..ready.len())];
            let deed = self.streams[pick].1.pop_front().expect("it can go on");
            self.obey(deed)?;
        }
    }

    fn seconds(&mut self, from: EventId, to: EventId) -> Result<f64> {
        let [from, to] = [from, to].map(|event| &self.events[event as usize]);
        assert!(from.gpu == to.gpu && from.passed > 0 && to.passed > 0, "a time between events that have not passed");
        Ok(to.at - from.at)
    }
}
