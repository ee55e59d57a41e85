//! The kernels' sources, compiled where they run: operand types and head widths are chosen by macros.

/// One `.cu` file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    pub name: &'static str,
    pub text: &'static str,
}

macro_rules! sources {
    ($($name:ident),*) => {
        /// Every source there is.
        pub const ALL: &[Source] = &[$($name),*];
        $(
            #[allow(non_upper_case_globals, missing_docs)]
            pub const $name: Source = Source {
                name: concat!(stringify!($name), ".cu"),
                text: include_str!(concat!("../kernels/cuda/", stringify!($name), ".cu")),
            };
        )*
    };
}

sources!(
    attention_fwd,
    attention_bwd,
    beside,
    expert,
    head_norm,
    latent,
    layout,
    loss,
    merge,
    muon,
    norm,
    pointwise,
    rope,
    ssm,
    ssm_scan
);

/// The headers that sources include, by name.
pub const HEADERS: &[Source] = &[
    Source { name: "common.cuh", text: include_str!("../kernels/cuda/common.cuh") },
    Source { name: "attention.cuh", text: include_str!("../kernels/cuda/attention.cuh") },
    Source { name: "wide.cuh", text: include_str!("../kernels/cuda/wide.cuh") },
];
