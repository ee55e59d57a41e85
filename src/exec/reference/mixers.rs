//! Layers of one mixer alone behind one norm: y = x + mixer(norm x).

use super::attention::{Attention, rotate};
use super::config::*;
use super::layer::Model;
use super::mamba::States;
use super::math::{Mat, relu2, relu2_slope};
use crate::spec::Mixer;
use ndarray::{Axis, concatenate};

pub struct Saved {
    x: Mat,
    /// The input behind the norm.
    pub normed: Mat,
    of: Of,
}

enum Of {
    Mamba(Box<States>),
    Attention(Box<Attention>),
    Mlp {
        up: Mat,
        act: Mat,
    },
    /// Experts, with the number of the sequence.
    Experts(usize),
}

impl Model<'_> {
    pub fn alone_forward(&self, i: usize, mixer: Mixer, sequence: usize, x: Mat) -> (Mat, Saved) {
        let normed = self.norm(&layer(i, NORM), &x);
        let (out, of) = match mixer {
            Mixer::Mamba => {
                let (out, states) = self.mamba(i, &normed);
                (out, Of::Mamba(Box::new(states)))
            }
            Mixer::Attention => {
                let mut qkv = self.linear(&layer(i, QKV), &normed);
                rotate(self.cfg, &mut qkv, 1.0);
                let attn = Attention::new(self.cfg, i, self.apart(&qkv), None);
                (self.linear(&layer(i, OUT), &attn.o), Of::Attention(Box::new(attn)))
            }
            Mixer::Mlp => {
                let up = self.linear(&layer(i, UP), &normed);
                let act = up.mapv(relu2);
                (self.linear(&layer(i, DOWN), &act), Of::Mlp { up, act })
            }
            Mixer::Experts => {
                let experts = self.cfg.experts_of(i).expect("the pattern says so");
                (self.experts(i, experts, sequence, &normed), Of::Experts(sequence))
            }
        };
        (&x + &out, Saved { x, normed, of })
    }

    pub fn alone_backward(&mut self, i: usize, saved: &Saved, dy: Mat) -> Mat {
        let normed = &saved.normed;
        let d_normed = match &saved.of {
            Of::Mamba(states) => self.mamba_backward(i, normed, states, &dy),
            Of::Attention(attn) => {
                let d_o = self.linear_backward(&layer(i, OUT), &attn.o, &dy);
                let d_heads = attn.backward(self.cfg, &d_o);
                let mut d_qkv = concatenate(Axis(1), &d_heads.each_ref().map(|d| d.view())).expect("equally long");
                rotate(self.cfg, &mut d_qkv, -1.0);
                self.linear_backward(&layer(i, QKV), normed, &d_qkv)
            }
            Of::Mlp { up, act } => {
                let d_act = self.linear_backward(&layer(i, DOWN), act, &dy);
                self.linear_backward(&layer(i, UP), normed, &(d_act * up.mapv(relu2_slope)))
            }
            Of::Experts(sequence) => self.experts_backward(i, *sequence, normed, &dy),
        };
        dy + self.norm_backward(&layer(i, NORM), &saved.x, &d_normed)
    }
}
