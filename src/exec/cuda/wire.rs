//! What processes say to each other: frames of a kind, a length and bytes, over TCP.

use super::super::arena::{Data, Peak};
use super::super::rank::Done;
use crate::plan::Dtype;
use crate::plan::memory::SlotId;
use std::io::{Error, ErrorKind, Read, Result, Write};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame {
    /// Tells who the sender is.
    Hello,
    /// Tells that all are there; the bytes that they share follow.
    Welcome,
    /// Tells that somebody failed; why follows.
    Failed,
    Data,
    Ping,
    /// Tells that the sender is done.
    Bye,
}

const FRAMES: [Frame; 6] = [Frame::Hello, Frame::Welcome, Frame::Failed, Frame::Data, Frame::Ping, Frame::Bye];
/// The first bytes of every frame, by which a stranger is known.
const MAGIC: [u8; 4] = *b"ftrn";
/// The length of frames in bytes is below this, which is more than any step leaves.
const MOST: u64 = 1 << 38;

/// Sends one frame.
pub fn send(to: &mut impl Write, frame: Frame, data: &[u8]) -> Result<()> {
    let kind = FRAMES.iter().position(|f| *f == frame).expect("listed") as u8;
    let head = [&MAGIC[..], &[kind], &(data.len() as u64).to_le_bytes()].concat();
    to.write_all(&head)?;
    to.write_all(data)?;
    to.flush()
}

/// Waits for one frame. Errors: the sender is no process of foretrain, or is gone.
pub fn receive(from: &mut impl Read) -> Result<(Frame, Vec<u8>)> {
    let mut head = [0; 13];
    from.read_exact(&mut head)?;
    let bytes = u64::from_le_bytes(head[5..].try_into().expect("eight bytes"));
    let frame = FRAMES.get(usize::from(head[4])).filter(|_| head[..4] == MAGIC && bytes < MOST);
    let frame = *frame.ok_or_else(|| Error::new(ErrorKind::InvalidData, "this is no process of foretrain"))?;
    let mut data = vec![];
    if from.take(bytes).read_to_end(&mut data)? < bytes as usize {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok((frame, data))
}

/// The bytes of a rank's results when a step is done, and of the number of bytes that it sent.
pub fn pack(done: &Done, sent: u64) -> Vec<u8> {
    let mut out = Out(vec![]);
    out.number(sent);
    out.number(done.peak.device);
    out.floats(done.times.iter().flat_map(|&(from, to)| [from, to]));
    out.floats(done.on_core.iter().copied());
    out.number(done.seen.len() as u64);
    for (slot, all) in &done.seen {
        out.slot(*slot);
        out.all(all);
    }
    out.number(done.kept.len() as u64);
    for (slot, data) in &done.kept {
        out.slot(*slot);
        out.all(std::slice::from_ref(data));
    }
    out.all(&done.logits);
    out.0
}

/// The results and the number that [`pack`] made bytes of; `None` where bytes were cut off.
pub fn unpack(bytes: &[u8]) -> Option<(Done, u64)> {
    let mut of = In(bytes);
    let (sent, peak) = (of.number()?, of.number()?);
    let times = of.floats()?.chunks(2).map(|t| (t[0], t[1])).collect();
    let on_core = of.floats()?;
    let seen = (0..of.number()?).map(|_| Some((of.slot()?, of.all()?))).collect::<Option<_>>()?;
    let kept = (0..of.number()?).map(|_| Some((of.slot()?, of.all()?.pop()?))).collect::<Option<_>>()?;
    let logits = of.all()?;
    Some((Done { times, on_core, copied: vec![], peak: Peak { device: peak, host: 0 }, seen, kept, logits }, sent))
}

struct Out(Vec<u8>);

impl Out {
    fn number(&mut self, n: u64) {
        self.0.extend(n.to_le_bytes());
    }

    fn floats(&mut self, all: impl Iterator<Item = f64>) {
        let all: Vec<f64> = all.collect();
        self.number(all.len() as u64);
        all.iter().for_each(|x| self.0.extend(x.to_le_bytes()));
    }

    fn slot(&mut self, slot: SlotId) {
        self.number(u64::from(slot.tensor));
        self.number(u64::from(slot.slot));
    }

    fn all(&mut self, all: &[Data]) {
        self.number(all.len() as u64);
        for data in all {
            let kind = DTYPES.iter().position(|d| *d == data.dtype()).expect("listed") as u64;
            self.number(kind);
            self.number(data.bytes());
            self.0.extend(data.to_bytes());
        }
    }
}

const DTYPES: [Dtype; 5] = [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::U32, Dtype::U8];

struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take(&mut self, bytes: u64) -> Option<&[u8]> {
        let (now, then) = self.0.split_at_checked(usize::try_from(bytes).ok()?)?;
        self.0 = then;
        Some(now)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn floats(&mut self) -> Option<Vec<f64>> {
        let bytes = self.number()?.checked_mul(8)?;
        let of = |b: &[u8]| f64::from_le_bytes(b.try_into().expect("eight bytes"));
        Some(self.take(bytes)?.chunks_exact(8).map(of).collect())
    }

    fn slot(&mut self) -> Option<SlotId> {
        let [tensor, slot] = [self.number()?, self.number()?];
        Some(SlotId { tensor: tensor.try_into().ok()?, slot: slot.try_into().ok()? })
    }

    fn all(&mut self) -> Option<Vec<Data>> {
        let one = |of: &mut Self| {
            let (dtype, bytes) = (*DTYPES.get(of.number()? as usize)?, of.number()?);
            Some(Data::from_bytes(of.take(bytes)?, dtype))
        };
        (0..self.number()?).map(|_| one(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_were_written() {
        let mut wire = vec![];
        send(&mut wire, Frame::Data, b"some").unwrap();
        send(&mut wire, Frame::Bye, b"").unwrap();
        let mut at = &wire[..];
        assert_eq!(receive(&mut at).unwrap(), (Frame::Data, b"some".to_vec()));
        assert_eq!(receive(&mut at).unwrap(), (Frame::Bye, vec![]));
        assert_eq!(receive(&mut at).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        assert!(receive(&mut &b"GET / HTTP/1.1\r\n\r\n"[..]).unwrap_err().to_string().contains("no process"));
    }

    #[test]
    fn what_a_step_leaves_is_read_as_it_was_written() {
        let at = |tensor| SlotId { tensor, slot: 2 };
        let done = Done {
            times: vec![(0.5, 1.0), (1.0, 2.5)],
            on_core: vec![0.5, 0.0],
            copied: vec![],
            peak: Peak { device: 77, host: 0 },
            seen: [(at(1), vec![Data::Bf16(vec![1, 2]), Data::F32(vec![0.5])])].into_iter().collect(),
            kept: [(at(3), Data::U32(vec![9]))].into_iter().collect(),
            logits: vec![Data::F32(vec![1.5, -2.0])],
        };
        let bytes = pack(&done, 5);
        let (got, sent) = unpack(&bytes).unwrap();
        assert_eq!((sent, got.peak.device, &got.times, &got.on_core), (5, 77, &done.times, &done.on_core));
        assert_eq!((&got.seen, &got.kept, &got.logits), (&done.seen, &done.kept, &done.logits));
        assert!(unpack(&bytes[..bytes.len() - 1]).is_none());
    }
}
