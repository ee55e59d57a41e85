//! Values of cudnn_graph.h, as cuDNN 9.8 and everything after it has them.

/// cudnnBackendDescriptorType_t.
pub mod kind {
    pub const POINTWISE: i32 = 0;
    pub const ENGINE_CONFIG: i32 = 3;
    pub const HEURISTICS: i32 = 4;
    pub const PLAN: i32 = 5;
    pub const POINTWISE_OP: i32 = 13;
    pub const GRAPH: i32 = 15;
    pub const VARIANT_PACK: i32 = 16;
    pub const TENSOR: i32 = 17;
    pub const MATMUL: i32 = 18;
    pub const MATMUL_OP: i32 = 19;
    pub const REDUCTION: i32 = 21;
    pub const REDUCTION_OP: i32 = 22;
    pub const RESHAPE_OP: i32 = 31;
    pub const DEVICE: i32 = 38;
}

/// cudnnBackendAttributeName_t.
pub mod attribute {
    pub const POINTWISE_MODE: i32 = 0;
    pub const POINTWISE_PRECISION: i32 = 1;
    pub const POINTWISE_AXIS: i32 = 9;
    pub const HEURISTICS_MODE: i32 = 200;
    pub const HEURISTICS_GRAPH: i32 = 201;
    pub const HEURISTICS_RESULTS: i32 = 202;
    pub const HEURISTICS_DEVICE: i32 = 204;
    pub const PLAN_CONFIG: i32 = 401;
    pub const PLAN_WORKSPACE: i32 = 402;
    pub const PLAN_DEVICE: i32 = 407;
    pub const POINTWISE_OP_OF: i32 = 750;
    pub const POINTWISE_OP_X: i32 = 751;
    pub const POINTWISE_OP_B: i32 = 752;
    pub const POINTWISE_OP_Y: i32 = 753;
    pub const POINTWISE_OP_T: i32 = 758;
    pub const GRAPH_OPS: i32 = 801;
    pub const TENSOR_ALIGNMENT: i32 = 900;
    pub const TENSOR_TYPE: i32 = 901;
    pub const TENSOR_DIMS: i32 = 902;
    pub const TENSOR_STRIDES: i32 = 903;
    pub const TENSOR_ID: i32 = 906;
    pub const TENSOR_VIRTUAL: i32 = 907;
    pub const TENSOR_BY_VALUE: i32 = 908;
    pub const PACK_IDS: i32 = 1000;
    pub const PACK_POINTERS: i32 = 1001;
    pub const PACK_WORKSPACE: i32 = 1003;
    pub const MATMUL_PRECISION: i32 = 1500;
    pub const MATMUL_OP_A: i32 = 1520;
    pub const MATMUL_OP_B: i32 = 1521;
    pub const MATMUL_OP_C: i32 = 1522;
    pub const MATMUL_OP_OF: i32 = 1523;
    pub const REDUCTION_OPERATOR: i32 = 1600;
    pub const REDUCTION_PRECISION: i32 = 1601;
    pub const REDUCTION_OP_X: i32 = 1610;
    pub const REDUCTION_OP_Y: i32 = 1611;
    pub const REDUCTION_OP_OF: i32 = 1612;
    pub const RESHAPE_OP_X: i32 = 2200;
    pub const RESHAPE_OP_Y: i32 = 2201;
    pub const DEVICE_HANDLE: i32 = 2701;
    pub const DEVICE_JSON: i32 = 2702;
}

/// cudnnBackendAttributeType_t.
pub mod of {
    pub const HANDLE: i32 = 0;
    pub const DATA_TYPE: i32 = 1;
    pub const BOOLEAN: i32 = 2;
    pub const INT64: i32 = 3;
    pub const POINTER: i32 = 6;
    pub const HEURISTICS_MODE: i32 = 8;
    pub const POINTWISE_MODE: i32 = 14;
    pub const DESCRIPTOR: i32 = 15;
    pub const REDUCTION_OPERATOR: i32 = 18;
    pub const CHAR: i32 = 24;
}

/// cudnnDataType_t.
pub mod data {
    pub const FLOAT: i32 = 0;
    pub const INT32: i32 = 4;
    pub const BF16: i32 = 9;
    pub const BOOLEAN: i32 = 11;
}

/// cudnnPointwiseMode_t.
pub mod pointwise {
    pub const ADD: i32 = 0;
    pub const MUL: i32 = 1;
    pub const DIV: i32 = 6;
    pub const SUB: i32 = 9;
    pub const EXP: i32 = 13;
    pub const LOG: i32 = 15;
    pub const IDENTITY: i32 = 21;
    pub const GREATER_OR_EQUAL: i32 = 303;
    pub const INDEX: i32 = 501;
    pub const SELECT: i32 = 601;
}

/// cudnnReduceTensorOp_t.
pub mod reduce {
    pub const ADD: i32 = 0;
    pub const MAX: i32 = 3;
}

/// CUDNN_HEUR_MODE_A: the library's own choice for the shape, by its model of the kernels' times.
pub const BY_MODEL: i32 = 3;

pub const SUCCESS: i32 = 0;
/// Statuses from here on, up to the next thousand, say that no engine takes it.
pub const NOT_SUPPORTED: i32 = 3000;
