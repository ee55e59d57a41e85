//! An exchange of a mixture-of-experts layer between ranks of one process: every member takes its rows out of the
//! others' memories, and adds up what belongs together.
//!
//! Rows end where the plan's algorithm leaves them. Its way there, over other ranks and nodes, is not gone: between
//! memories of one process it would show nothing of a network. Between processes each packs what the others want of it, and
//! all of it goes at once, straight from source to destination: [`between`].

use super::lower::{Lowered, Sum, Term, sums};
use super::script::Linked;
use crate::error::{Error, Result};
use crate::plan::link::Place;
use crate::plan::memory::ALIGN;
use crate::plan::rows::{Layout, RowId, WHOLE, place_of};
use crate::plan::{Dtype, OpKind, Phase, Route};
use rustc_hash::FxHashMap;

/// Where rows are, by name: places, numbers and choices.
type Offers = FxHashMap<RowId, Vec<(u32, u32, u32)>>;

/// An exchange as a member sees it: its route, its place, and how rows lie before and after.
struct Meeting<'p> {
    route: &'p Route,
    here: u32,
    from: Layout,
    to: Layout,
    /// Whether rows of tokens go as one row for each choice.
    by_choice: bool,
    combines: bool,
}

impl<'p> Meeting<'p> {
    fn new(linked: Linked<'p>, rank: u32, node: u32) -> Result<Meeting<'p>> {
        let line = linked.line(rank);
        let OpKind::Exchange { route, algo, phase, .. } = &line.nodes[node as usize].op.kind else {
            unreachable!("only exchanges exchange")
        };
        let route = linked.plan.route_of(*route, rank);
        if !route.is_listed() {
            let why = "its route is balanced, which says how many rows go and not which; give --routing uniform";
            return Err(Error::device(format!("rank {rank}, {}", line.path(node as usize)), why));
        }
        let [from, to] = algo.ends(*phase);
        let (here, combines) = (place_of(&linked.plan.views, rank), *phase == Phase::Combine);
        Ok(Meeting { route, here, from, to, by_choice: algo.landed().by_choice(), combines })
    }

    /// Where the members have the rows of each name: by place and number, in the order they are added up.
    fn offers(&self) -> Offers {
        let mut offers = Offers::default();
        for place in 0..self.route.ranks {
            for (i, id) in (0..).zip(self.from.list(self.route, place)) {
                offers.entry(id).or_default().push((place, i, id.choice));
                if id.choice != WHOLE {
                    offers.entry(id.whole()).or_default().push((place, i, id.choice));
                }
            }
        }
        // Choices in their order; what whole rows have is added in the order of the ranks.
        offers.values_mut().for_each(|all| all.sort_by_key(|&(place, i, choice)| (choice, place, i)));
        offers
    }

    /// The rows that a member gets, each with what it is made of.
    fn rows(&self, offers: &Offers, place: u32, capacity: usize) -> Vec<Vec<(u32, u32, u32)>> {
        let of = |id: RowId| match offers.get(&id).or_else(|| offers.get(&id.whole())) {
            // A token's row may become several: each is the row itself, and not one of its copies.
            Some(all) if !self.combines => all.iter().filter(|o| o.0 == id.src).take(1).copied().collect(),
            Some(all) => all.clone(),
            None => vec![],
        };
        let mut rows: Vec<_> = self.to.list(self.route, place).into_iter().map(of).collect();
        if self.to == Layout::Tokens {
            rows.resize(capacity, vec![]);
        }
        rows
    }
}

/// The rows that a member gets into one buffer, out of the members' buffers that it is paired with.
struct Gets {
    /// Runs of the member's buffer; the terms of each are read at the members' places.
    sums: Vec<Sum>,
    /// Elements of each run.
    len: u64,
    /// Dtype of the buffers that are sent, and of the member's own.
    dtypes: [Dtype; 2],
}

impl Meeting<'_> {
    /// What a member gets, by pair of buffers: the member at `place`, whose op is `node` of `rank`.
    fn gets(&self, linked: Linked, offers: &Offers, (place, rank, node): (u32, u32, u32)) -> Vec<Gets> {
        let line = linked.line(rank);
        let pairs = line.reads(node as usize).iter().zip(line.writes(node as usize));
        pairs.map(|pair| self.gets_of(linked, offers, place, pair)).collect()
    }

    fn gets_of(&self, linked: Linked, offers: &Offers, place: u32, (from, to): (&Place, &Place)) -> Gets {
        let tensor = |place: &Place| &linked.plan.tensors[place.tensor as usize];
        let (a, z) = (tensor(from).row_len(), tensor(to).row_len());
        let rows = self.rows(offers, place, (to.rows[1] - to.rows[0]) as usize);
        let ids = self.to.list(self.route, place);
        let mut all = vec![];
        for (i, terms) in rows.iter().enumerate() {
            let choice = ids.get(i).map_or(WHOLE, |id| id.choice);
            if a < z {
                // A number for each choice lands in the row of its token.
                for c in 0..z {
                    let own = terms.iter().filter(|t| u64::from(t.2) == c);
                    let terms = own.map(|&(place, row, _)| Term { read: place as usize, from: u64::from(row) * a });
                    all.push(Sum { to: i as u64 * z + c, terms: terms.collect() });
                }
                continue;
            }
            // A row of one choice takes its own of its token's numbers for each choice.
            let skip = if a > z && self.by_choice { u64::from(choice) } else { 0 };
            let term =
                |&(place, row, _): &(u32, u32, u32)| Term { read: place as usize, from: u64::from(row) * a + skip };
            all.push(Sum { to: i as u64 * z, terms: terms.iter().map(term).collect() });
        }
        Gets { sums: all, len: a.min(z), dtypes: [tensor(from).dtype, tensor(to).dtype] }
    }
}

/// What one member launches. Its reads are the buffers of all members, one member after the other. Errors: a balanced
/// route, which does not say which rows go.
pub fn lower(linked: Linked, rank: u32, node: u32) -> Result<Lowered> {
    let meeting = Meeting::new(linked, rank, node)?;
    let buffers = linked.line(rank).reads(node as usize).len();
    let mut lowered = Lowered::default();
    for (b, mut gets) in meeting.gets(linked, &meeting.offers(), (meeting.here, rank, node)).into_iter().enumerate() {
        gets.sums.iter_mut().flat_map(|sum| &mut sum.terms).for_each(|term| term.read = term.read * buffers + b);
        sums(&mut lowered, &gets.sums, [gets.len, b as u64], gets.dtypes)?;
    }
    Ok(lowered)
}

/// Bytes that a member takes from each of the others: by rank.
pub fn taken(linked: Linked, rank: u32, node: u32) -> Result<Vec<(u32, u64)>> {
    let meeting = Meeting::new(linked, rank, node)?;
    let line = linked.line(rank);
    let members = linked.members(rank, node)?;
    let (src, dst) = (line.reads(node as usize), line.writes(node as usize));
    let offers = meeting.offers();
    let mut bytes = vec![0u64; members.len()];
    for (from, to) in src.iter().zip(dst) {
        let [a, z] = [from, to].map(|place| &linked.plan.tensors[place.tensor as usize]);
        let row = a.row_len().min(z.row_len()) * a.dtype.size();
        let rows = meeting.rows(&offers, meeting.here, (to.rows[1] - to.rows[0]) as usize);
        for (place, _, _) in rows.into_iter().flatten() {
            bytes[place as usize] += row;
        }
    }
    let others = members.iter().zip(bytes).filter(|((member, _), _)| *member != rank);
    Ok(others.map(|((member, _), bytes)| (*member, bytes)).collect())
}

/// A message between this member and the one at `place`: `bytes` from byte `at` on of the rows that are packed, or that
/// come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    pub place: u32,
    pub at: u64,
    pub bytes: u64,
}

/// A member's exchange with members in other processes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Between {
    /// Reads the member's own buffers; writes what goes, a piece for each of them.
    pub pack: Lowered,
    /// Reads the member's own buffers, then what comes, a piece for each of them; writes the member's own.
    pub unpack: Lowered,
    /// Messages in the order that both ends have: by buffer.
    pub sends: Vec<Message>,
    pub receives: Vec<Message>,
    /// The bytes at which the pieces of what goes, and of what comes, begin; the last entry of each is the end.
    pub pieces: [Vec<u64>; 2],
}

impl Between {
    /// Bytes of everything that goes, and of everything that comes.
    pub fn room(&self) -> [u64; 2] {
        [0, 1].map(|side| self.pieces[side].last().copied().unwrap_or(0))
    }

    pub fn sent(&self) -> u64 {
        self.sends.iter().map(|message| message.bytes).sum()
    }
}

/// Runs of one buffer on their way, end to end, first those for or from the first member.
struct Piece {
    at: u64,
    len: u64,
    size: u64,
    runs: u64,
}

impl Piece {
    fn new(at: u64, gets: &Gets) -> Piece {
        Piece { at, len: gets.len, size: gets.dtypes[0].size(), runs: 0 }
    }

    /// Adds `runs` runs for or from the member at `place`. Returns the element that they begin at, and their message.
    fn more(&mut self, place: u32, runs: u64) -> (u64, Message) {
        let run = self.len * self.size;
        let message = Message { place, at: self.at + self.runs * run, bytes: runs * run };
        let first = self.runs * self.len;
        self.runs += runs;
        (first, message)
    }

    fn end(&self) -> u64 {
        (self.at + self.runs * self.len * self.size).next_multiple_of(ALIGN)
    }
}

/// What a member packs, sends, receives and adds up where the others are in processes of their own. How much goes to whom
/// is known of the route, to both ends; a member that nothing goes to gets no message.
pub fn between(linked: Linked, rank: u32, node: u32) -> Result<Between> {
    let meeting = Meeting::new(linked, rank, node)?;
    let (members, offers, own) = (linked.members(rank, node)?, meeting.offers(), meeting.here);
    let all: Vec<Vec<Gets>> = (0..)
        .zip(&members)
        .map(|(place, &(member, node))| meeting.gets(linked, &offers, (place, member, node)))
        .collect();
    let mut between = Between { pieces: [vec![0], vec![0]], ..Between::default() };
    for b in 0..all[own as usize].len() {
        between.goes(&all, b, own)?;
        between.comes(&all, b, own)?;
    }
    Ok(between)
}

impl Between {
    /// Packs what the others read of this member's buffer `b`, in the order that they do.
    fn goes(&mut self, all: &[Vec<Gets>], b: usize, own: u32) -> Result<()> {
        let (mut piece, mut packed) = (Piece::new(self.room()[0], &all[own as usize][b]), vec![]);
        for (place, gets) in (0..).zip(all).filter(|(place, _)| *place != own) {
            let wanted = gets[b].sums.iter().flat_map(|sum| &sum.terms).filter(|term| term.read == own as usize);
            let wanted: Vec<u64> = wanted.map(|term| term.from).collect();
            let (first, message) = piece.more(place, wanted.len() as u64);
            let run = |(i, from)| Sum { to: first + i * piece.len, terms: vec![Term { read: b, from }] };
            packed.extend((0..).zip(wanted).map(run));
            self.sends.extend(Some(message).filter(|message| message.bytes > 0));
        }
        let dtype = all[own as usize][b].dtypes[0];
        self.pieces[0].push(piece.end());
        sums(&mut self.pack, &packed, [piece.len, b as u64], [dtype; 2])
    }

    /// Adds up this member's buffer `b` from its own runs and those that come.
    fn comes(&mut self, all: &[Vec<Gets>], b: usize, own: u32) -> Result<()> {
        let (gets, buffers) = (&all[own as usize][b], all[own as usize].len());
        let mut piece = Piece::new(self.room()[1], gets);
        let mut counts = vec![0; all.len()];
        gets.sums.iter().flat_map(|sum| &sum.terms).for_each(|term| counts[term.read] += 1);
        let mut next = vec![0; all.len()];
        for place in (0..all.len()).filter(|place| *place != own as usize) {
            let (first, message) = piece.more(place as u32, counts[place]);
            next[place] = first;
            self.receives.extend(Some(message).filter(|message| message.bytes > 0));
        }
        let mut term = |term: &Term| {
            if term.read == own as usize {
                return Term { read: b, from: term.from };
            }
            let from = next[term.read];
            next[term.read] += piece.len;
            Term { read: buffers + b, from }
        };
        let sum = |sum: &Sum| Sum { to: sum.to, terms: sum.terms.iter().map(&mut term).collect() };
        let made: Vec<Sum> = gets.sums.iter().map(sum).collect();
        self.pieces[1].push(piece.end());
        sums(&mut self.unpack, &made, [gets.len, b as u64], gets.dtypes)
    }
}
