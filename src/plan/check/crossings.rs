//! Checks what passes between programs: every send meets a receive of the same tag and size, and no crews wait for each
//! other in a circle.

use crate::error::{Error, Result};
use crate::plan::crew::{Crews, PostId, Watch};
use crate::plan::*;

/// Proves that crossings meet, by going through all programs side by side. Errors: a send or receive without its half,
/// parts of a collective that differ, crews that wait for each other.
pub fn meet(plan: &Plan, crews: &Crews) -> Result<()> {
    crews.run(&mut Meetings { plan, posts: vec![] })
}

struct Meetings<'p> {
    plan: &'p Plan,
    posts: Vec<(usize, &'p Op)>,
}

impl<'p> Meetings<'p> {
    fn leg(&self, (post, leg): (PostId, u16)) -> (String, Leg) {
        let (crew, op) = self.posts[post];
        let OpKind::Transfer { legs, .. } = &op.kind else { unreachable!("only transfers have legs") };
        (format!("{}/{}", self.plan.programs[crew].name, op.label), legs[leg as usize])
    }

    /// Elements and dtype of a buffer.
    fn size(&self, buf: Buf) -> (u64, Dtype) {
        let tensor = &self.plan.tensors[buf.tensor() as usize];
        (tensor.elems_of(buf.rows), tensor.dtype)
    }
}

impl<'p> Watch<'p> for Meetings<'p> {
    fn local(&mut self, _: usize, _: &'p [Op]) -> Result<()> {
        Ok(())
    }

    fn call(&mut self, _: usize, _: &'p Op) -> Result<()> {
        Ok(())
    }

    fn post(&mut self, _: PostId, crew: usize, op: &'p Op) -> Result<()> {
        self.posts.push((crew, op));
        Ok(())
    }

    fn start(&mut self, _: PostId, _: &[PostId]) -> Result<()> {
        Ok(())
    }

    fn meet(&mut self, send: (PostId, u16), recv: (PostId, u16)) -> Result<()> {
        let ((here, send), (there, recv)) = (self.leg(send), self.leg(recv));
        let (sent, received) = (self.size(send.buf), self.size(recv.buf));
        if send.tag == recv.tag && sent == received {
            return Ok(());
        }
        Err(Error::plan(format!(
            "{here} with tag {} and {sent:?} meets {there} with tag {} and {received:?}",
            send.tag, recv.tag
        )))
    }

    /// Checks that all parts of a collective have one size; whether that fits the group is checked for every body.
    fn gather(&mut self, posts: &[PostId]) -> Result<()> {
        let part = |&post: &PostId| match &self.posts[post].1.kind {
            OpKind::Collective { kind, src, dst, wire, .. } => {
                Some((*kind, self.size(*src).0, self.size(*dst).0, *wire))
            }
            _ => None,
        };
        let parts: Vec<_> = posts.iter().map(part).collect();
        if parts.windows(2).all(|w| w[0] == w[1]) {
            return Ok(());
        }
        let name = |&post: &PostId| self.posts[post].1.label.as_str();
        let names: Vec<_> = posts.iter().map(name).collect();
        Err(Error::plan(format!("{} are not one collective: {parts:?}", names.join(", "))))
    }

    fn end(&mut self, _: PostId) -> Result<()> {
        Ok(())
    }
}
