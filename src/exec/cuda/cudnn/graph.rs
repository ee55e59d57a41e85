//! A graph of operations over tensors, from which cuDNN picks what it has fused.

use super::api::{Api, Descriptor, Failed, Value};
use super::names::{attribute, data, kind, of, pointwise};
use std::rc::Rc;

type Called<T> = std::result::Result<T, Failed>;

/// What a tensor that is no intermediate result is bound to when the graph is executed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// The next of the operands, in the order in which they were made.
    Operand,
    /// Four bytes of the host's: a float or an i32.
    Scalar([u8; 4]),
}

/// A tensor of a graph, by its place among those that were made.
#[derive(Debug, Clone, Copy)]
pub struct Tensor(usize);

/// Sizes and steps of a tensor [sequences, heads, rows, columns].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    pub dims: [u64; 4],
    pub strides: [u64; 4],
}

impl Shape {
    /// The shape of rows one behind the other.
    pub fn packed(dims: [u64; 4]) -> Shape {
        let [_, heads, rows, cols] = dims;
        Shape { dims, strides: [heads * rows * cols, rows * cols, cols, 1] }
    }

    /// The shape with rows and columns exchanged, over the numbers where they are.
    pub fn transposed(self) -> Shape {
        let swap = |[a, b, c, d]: [u64; 4]| [a, b, d, c];
        Shape { dims: swap(self.dims), strides: swap(self.strides) }
    }
}

pub struct Graph {
    api: Rc<Api>,
    tensors: Vec<Descriptor>,
    ops: Vec<Descriptor>,
    /// Descriptions that operations point to.
    held: Vec<Descriptor>,
    /// Unique ids of the tensors that are bound, which are their places and one.
    pub bound: Vec<(i64, Bound)>,
}

/// Alignment, bytes: every address that plans come to is a multiple of 16; those of single numbers, of four.
const WIDE: i64 = 16;
const NARROW: i64 = 4;

impl Graph {
    pub fn new(api: &Rc<Api>) -> Graph {
        Graph { api: api.clone(), tensors: vec![], ops: vec![], held: vec![], bound: vec![] }
    }

    fn tensor(&mut self, shape: Shape, dtype: i32, bound: Option<Bound>) -> Called<Tensor> {
        let id = self.tensors.len() as i64 + 1;
        let ints = |of: [u64; 4]| of.map(|n| n as i64);
        let made = Descriptor::new(&self.api, kind::TENSOR)?;
        made.set(attribute::TENSOR_TYPE, Value::DataType(dtype))?;
        made.set(attribute::TENSOR_DIMS, Value::Ints(&ints(shape.dims)))?;
        made.set(attribute::TENSOR_STRIDES, Value::Ints(&ints(shape.strides)))?;
        made.set(attribute::TENSOR_ID, Value::Ints(&[id]))?;
        let single = bound.is_some() && shape.dims[3] == 1;
        made.set(attribute::TENSOR_ALIGNMENT, Value::Ints(&[if single { NARROW } else { WIDE }]))?;
        match bound {
            None => made.set(attribute::TENSOR_VIRTUAL, Value::Flag(true))?,
            Some(Bound::Scalar(_)) => made.set(attribute::TENSOR_BY_VALUE, Value::Flag(true))?,
            Some(Bound::Operand) => {}
        }
        self.tensors.push(made.finish("a tensor")?);
        self.bound.extend(bound.map(|bound| (id, bound)));
        Ok(Tensor(self.tensors.len() - 1))
    }

    /// A tensor that is in memory when the graph is executed.
    pub fn operand(&mut self, shape: Shape, dtype: i32) -> Called<Tensor> {
        self.tensor(shape, dtype, Some(Bound::Operand))
    }

    /// An intermediate tensor, which only the graph knows.
    pub fn between(&mut self, shape: Shape, dtype: i32) -> Called<Tensor> {
        self.tensor(shape, dtype, None)
    }

    pub fn float(&mut self, value: f32) -> Called<Tensor> {
        self.tensor(Shape::packed([1; 4]), data::FLOAT, Some(Bound::Scalar(value.to_ne_bytes())))
    }

    pub fn int(&mut self, value: i32) -> Called<Tensor> {
        self.tensor(Shape::packed([1; 4]), data::INT32, Some(Bound::Scalar(value.to_ne_bytes())))
    }

    fn op(&mut self, kind: i32, of: &[(i32, Tensor)], about: Option<(i32, Descriptor)>) -> Called<()> {
        let made = Descriptor::new(&self.api, kind)?;
        if let Some((attribute, about)) = about {
            made.set(attribute, Value::Of(&about))?;
            self.held.push(about);
        }
        for &(attribute, tensor) in of {
            made.set(attribute, Value::Of(&self.tensors[tensor.0]))?;
        }
        self.ops.push(made.finish("an operation")?);
        Ok(())
    }

    /// `to` = mode(x, y), and of a selection by `by` besides; computed as `precision`, along `axis` if it is an index.
    fn pointwise(
        &mut self,
        (mode, precision, axis): (i32, i32, Option<i64>),
        x: Tensor,
        y: Option<Tensor>,
        by: Option<Tensor>,
        to: Tensor,
    ) -> Called<Tensor> {
        let about = Descriptor::new(&self.api, kind::POINTWISE)?;
        about.set(attribute::POINTWISE_MODE, Value::Mode(of::POINTWISE_MODE, mode))?;
        about.set(attribute::POINTWISE_PRECISION, Value::DataType(precision))?;
        if let Some(axis) = axis {
            about.set(attribute::POINTWISE_AXIS, Value::Ints(&[axis]))?;
        }
        let mut tensors = vec![(attribute::POINTWISE_OP_X, x), (attribute::POINTWISE_OP_Y, to)];
        tensors.extend(y.map(|y| (attribute::POINTWISE_OP_B, y)));
        tensors.extend(by.map(|by| (attribute::POINTWISE_OP_T, by)));
        let about = about.finish("a pointwise operation")?;
        self.op(kind::POINTWISE_OP, &tensors, Some((attribute::POINTWISE_OP_OF, about)))?;
        Ok(to)
    }

    /// `to` = mode(x), in floats.
    pub fn map(&mut self, mode: i32, x: Tensor, to: Tensor) -> Called<Tensor> {
        self.pointwise((mode, data::FLOAT, None), x, None, None, to)
    }

    /// `to` = mode(x, y), in floats.
    pub fn zip(&mut self, mode: i32, x: Tensor, y: Tensor, to: Tensor) -> Called<Tensor> {
        self.pointwise((mode, data::FLOAT, None), x, Some(y), None, to)
    }

    /// Scores of keys behind the diagonal become `hidden`: column > row + diagonal.
    pub fn hide(&mut self, scores: Tensor, shape: Shape, diagonal: u64, hidden: f32) -> Called<Tensor> {
        let (rows, columns) = (self.between(shape, data::INT32)?, self.between(shape, data::INT32)?);
        let mut row = self.pointwise((pointwise::INDEX, data::FLOAT, Some(2)), scores, None, None, rows)?;
        let column = self.pointwise((pointwise::INDEX, data::FLOAT, Some(3)), scores, None, None, columns)?;
        if diagonal > 0 {
            let (by, to) = (self.int(diagonal as i32)?, self.between(shape, data::INT32)?);
            row = self.pointwise((pointwise::ADD, data::INT32, Some(3)), row, Some(by), None, to)?;
        }
        let seen = self.between(shape, data::BOOLEAN)?;
        let seen = self.pointwise((pointwise::GREATER_OR_EQUAL, data::BOOLEAN, None), row, Some(column), None, seen)?;
        let (hidden, to) = (self.float(hidden)?, self.between(shape, data::FLOAT)?);
        self.pointwise((pointwise::SELECT, data::FLOAT, None), scores, Some(hidden), Some(seen), to)
    }

    /// `to` = a b, heads of b serving as many of a each.
    pub fn product(&mut self, a: Tensor, b: Tensor, to: Tensor) -> Called<Tensor> {
        let about = Descriptor::new(&self.api, kind::MATMUL)?;
        about.set(attribute::MATMUL_PRECISION, Value::DataType(data::FLOAT))?;
        let about = about.finish("a product")?;
        let tensors = [(attribute::MATMUL_OP_A, a), (attribute::MATMUL_OP_B, b), (attribute::MATMUL_OP_C, to)];
        self.op(kind::MATMUL_OP, &tensors, Some((attribute::MATMUL_OP_OF, about)))?;
        Ok(to)
    }

    /// Reduces x along whatever dims `to` has less of.
    pub fn reduce(&mut self, operator: i32, x: Tensor, to: Tensor) -> Called<Tensor> {
        let about = Descriptor::new(&self.api, kind::REDUCTION)?;
        about.set(attribute::REDUCTION_OPERATOR, Value::Mode(of::REDUCTION_OPERATOR, operator))?;
        about.set(attribute::REDUCTION_PRECISION, Value::DataType(data::FLOAT))?;
        let about = about.finish("a reduction")?;
        let tensors = [(attribute::REDUCTION_OP_X, x), (attribute::REDUCTION_OP_Y, to)];
        self.op(kind::REDUCTION_OP, &tensors, Some((attribute::REDUCTION_OP_OF, about)))?;
        Ok(to)
    }

    /// The numbers of x by other sizes and steps.
    pub fn reshape(&mut self, x: Tensor, to: Tensor) -> Called<Tensor> {
        self.op(kind::RESHAPE_OP, &[(attribute::RESHAPE_OP_X, x), (attribute::RESHAPE_OP_Y, to)], None)?;
        Ok(to)
    }

    /// The graph, with everything that it points to.
    pub fn finish(self) -> Called<Whole> {
        let graph = Descriptor::new(&self.api, kind::GRAPH)?;
        graph.set(attribute::GRAPH_OPS, Value::OfAll(&self.ops))?;
        let graph = graph.finish("a graph")?;
        Ok(Whole { graph, bound: self.bound, _parts: [self.ops, self.held, self.tensors] })
    }
}

pub struct Whole {
    pub graph: Descriptor,
    pub bound: Vec<(i64, Bound)>,
    _parts: [Vec<Descriptor>; 3],
}

impl std::fmt::Debug for Whole {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "a graph of {:?}", self.bound)
    }
}
