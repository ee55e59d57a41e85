//! Memory of messages that were delivered, for the next ones of the same size. Fresh memory is not there before it is
//! touched: each page of it costs a call of the system, more than copying the page does.

use super::arena::Data;
use crate::plan::Dtype;
use rustc_hash::FxHashMap;
use std::sync::Mutex;

/// Memory of delivered messages, by dtype and length. A plan has few sizes of messages, and as many of each as are ever
/// under way at once.
#[derive(Default)]
pub struct Spares {
    all: Mutex<FxHashMap<(Dtype, u64), Vec<Data>>>,
}

impl Spares {
    /// Memory for `elems` elements, with old values in it; `None` where there is no spare.
    pub fn take(&self, dtype: Dtype, elems: u64) -> Option<Data> {
        let mut all = self.all.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.get_mut(&(dtype, elems))?.pop()
    }

    pub fn put(&self, data: Data) {
        let mut all = self.all.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.entry((data.dtype(), data.len())).or_default().push(data);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_for_the_same_size_alone() {
        let spares = Spares::default();
        assert_eq!(spares.take(Dtype::F32, 3), None);
        spares.put(Data::F32(vec![1.0; 3]));
        assert_eq!((spares.take(Dtype::F32, 4), spares.take(Dtype::U32, 3)), (None, None));
        assert_eq!(spares.take(Dtype::F32, 3), Some(Data::F32(vec![1.0; 3])));
        assert_eq!(spares.take(Dtype::F32, 3), None);
    }
}
