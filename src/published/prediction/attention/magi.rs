//! What goes over the links of MagiAttention (github:SandAI-org/MagiAttention), which is not all of KV to every rank.

use super::documents;
use crate::cluster::Cluster;
use crate::published::row::case::Attention;
use crate::published::row::words::squeezed;

/// Tokens that its solver deals out at a time (`chunk_size` of exps/dist_attn/benchmark_conf.py there).
const DEALT: f64 = 2048.0;

fn is_packed(row: &Attention) -> bool {
    !row.documents.is_empty() || documents::are_packed(&row.mask)
}

/// An exchange by `all_to_all_v`, without its own kernels, sends a row to every rank that needs it, where a ring or a
/// hierarchical kernel brings it to a node once: that many times as much leaves a node.
pub fn one_by_one(row: &Attention, cluster: &mut Cluster) -> Option<String> {
    let ranks = cluster.per_node();
    // Rows of short documents have few ranks to go to.
    let alone = !is_packed(row) && squeezed(&row.family).contains("a2av");
    let out = cluster.spec.scale_out.as_mut().filter(|_| alone)?;
    out.achieved.value = out.achieved.value * (1.0 / f64::from(ranks));
    Some(format!("taken: KV leaves a node {ranks} times, once for each rank of another"))
}

/// The row as the ranks that share a document see it: parts of the sequence are dealt out evenly, so that a document is
/// on as many ranks as it has parts, over the same nodes, and a rank gets the KV of the documents that its parts are in.
pub fn dealt(row: &Attention) -> Option<Attention> {
    let is = squeezed(&row.family).contains("magi") && row.documents.is_empty() && documents::are_packed(&row.mask);
    let (seq, gpus) = (row.seq.filter(|_| is)?, row.gpus.filter(|gpus| *gpus > 1)?);
    let nodes = row.nodes.unwrap_or(1).max(1);
    let seen = documents::seen(seq);
    let parts = (seen / DEALT / f64::from(nodes)).round().max(if nodes == 1 { 2.0 } else { 1.0 }) as u32 * nodes;
    let parts = parts.min(gpus);
    let unit = 2 * u64::from(parts);
    let document = (seen as u64 / unit).max(1) * unit;
    let tokens = seq / u64::from(gpus) * u64::from(parts);
    let batch = (tokens as f64 / document as f64).round().max(1.0) as u64;
    let (batch, seq) = (Some(row.batch.unwrap_or(1) * batch), Some(document));
    Some(Attention { gpus: Some(parts), batch, seq, mask: String::new(), ..row.clone() })
}

/// The machine with its ranks on so many nodes, and a part of the NICs of each.
pub fn spread(cluster: &Cluster, nodes: u32) -> Result<Cluster, String> {
    let (mut spec, gpus) = (cluster.spec.clone(), cluster.gpus());
    let each = gpus.div_ceil(nodes.max(1));
    if each < spec.gpus_per_node && gpus.is_multiple_of(each) {
        if let Some(out) = &mut spec.scale_out {
            out.nics_per_node = (out.nics_per_node * each).div_ceil(spec.gpus_per_node);
        }
        spec.gpus_per_node = each;
    }
    Cluster::new(&spec, &cluster.gpu, gpus).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_on_as_many_ranks_as_it_has_parts() {
        let row = |gpus: u32| Attention {
            family: "magi_attn-native".into(),
            mask: "varlen_full_mask".into(),
            gpus: Some(gpus),
            nodes: Some(gpus / 8),
            seq: Some(8192 * u64::from(gpus)),
            ..Attention::default()
        };
        for (gpus, parts) in [(8, 4), (16, 6), (32, 8), (64, 8)] {
            let found = dealt(&row(gpus)).unwrap();
            assert_eq!(found.gpus, Some(parts), "{gpus}");
            // As much for every rank as before, and as much that a token sees.
            let tokens = found.batch.unwrap() * found.seq.unwrap() / u64::from(parts);
            assert!(tokens.abs_diff(8192) < 1400, "{gpus}: {tokens}");
            assert!((found.seq.unwrap() as f64 / documents::seen(8192 * u64::from(gpus)) - 1.0).abs() < 0.01);
        }
        assert!(dealt(&Attention { family: "usp".into(), ..row(8) }).is_none());
        assert!(dealt(&Attention { mask: "full_mask".into(), ..row(8) }).is_none());
    }
}
