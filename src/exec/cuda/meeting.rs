//! Processes that belong together find each other, and notice when one of them fails: rank 0 listens, the others come,
//! and the connections stay open. Nothing here knows of GPUs.

use super::process::Process;
use super::wire::{Frame, receive, send};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Who a process is, and what all of them have to agree on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub rank: u32,
    pub world: u32,
    pub foretrain: String,
    /// NCCL's version as ncclGetVersion says it.
    pub nccl: i32,
    /// The hash of the plan.
    pub plan: String,
    /// The node and GPU, in words.
    pub place: String,
    /// Why this process can take no part; `None`: it takes part. It comes all the same, so that the others need not
    /// wait for it.
    #[serde(default)]
    pub trouble: Option<String>,
}

/// The environment variable of how many seconds to wait: for the others to come, and for what they are to bring.
pub const TIMEOUT: &str = "FORETRAIN_TIMEOUT";

/// How long to wait: the seconds that [`TIMEOUT`] says, or five minutes, since kernels are compiled meanwhile. Errors:
/// text that is no number of seconds above 0 and below a million.
pub fn timeout(said: Option<String>) -> Result<Duration> {
    let Some(text) = said else { return Ok(Duration::from_secs(300)) };
    let seconds = text.trim().parse::<f64>().ok().filter(|s| *s > 0.0 && *s < 1e6);
    let why = || Error::spec("environment", TIMEOUT, format!("{text:?} is no number of seconds"));
    seconds.map(Duration::from_secs_f64).ok_or_else(why)
}

/// The time between two signs of life, and after how long without any a process is given up.
const PING: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(30);
/// For how long rank 0 tries to listen on a port that is taken.
const BUSY: Duration = Duration::from_secs(5);
/// For how long rank 0 waits for processes that are still to come, to tell them why nothing comes of it.
const LATE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct State {
    failed: Option<String>,
    /// What each rank has sent, in order.
    inbox: BTreeMap<u32, VecDeque<Vec<u8>>>,
    ended: Vec<u32>,
    closing: bool,
}

#[derive(Default)]
struct Board {
    state: Mutex<State>,
    changed: Condvar,
}

impl Board {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|p| p.into_inner())
    }
}

type Link = (u32, Arc<Mutex<TcpStream>>);

/// This process among the others.
pub struct Meeting {
    pub rank: u32,
    pub world: u32,
    /// Connections: rank 0 has one to everyone; everyone else has one to rank 0.
    links: Vec<Link>,
    board: Arc<Board>,
    timeout: Duration,
}

impl Meeting {
    /// Comes together with the others at `address`. `shared` is made by rank 0 and given to all. Errors: somebody does
    /// not come in time, comes twice, comes to say that it can take no part, or has another number of processes, version or
    /// plan; everyone is told why.
    pub fn join(
        hello: &Hello,
        address: &(String, u16),
        timeout: Duration,
        shared: &dyn Fn() -> Result<Vec<u8>>,
    ) -> Result<(Meeting, Vec<u8>)> {
        let until = Instant::now() + timeout;
        let (streams, shared) = match hello.rank {
            0 => gathered(hello, address.1, until, shared)?,
            _ => {
                let (stream, shared) = come(hello, address, until)?;
                (vec![(0, stream)], shared)
            }
        };
        let meeting = Meeting {
            rank: hello.rank,
            world: hello.world,
            links: streams.into_iter().map(|(rank, stream)| (rank, Arc::new(Mutex::new(stream)))).collect(),
            board: Arc::new(Board::default()),
            timeout,
        };
        meeting.listen()?;
        Ok((meeting, shared))
    }

    /// A thread for what each link brings, and one that says that this process lives.
    fn listen(&self) -> Result<()> {
        for (peer, link) in &self.links {
            let stream = lock(link).try_clone().map_err(|e| Error::device("join", e))?;
            stream.set_read_timeout(Some(SILENCE)).map_err(|e| Error::device("join", e))?;
            let (board, others, peer) = (self.board.clone(), self.links.clone(), *peer);
            std::thread::spawn(move || hear(stream, peer, &board, &others));
        }
        let (board, links) = (self.board.clone(), self.links.clone());
        std::thread::spawn(move || {
            let mut state = board.state();
            while !state.closing {
                state = board.changed.wait_timeout(state, PING).map_or_else(|p| p.into_inner().0, |w| w.0);
                let stop = state.closing;
                drop(state);
                if !stop {
                    links.iter().for_each(|(_, link)| drop(send(&mut *lock(link), Frame::Ping, &[])));
                }
                state = board.state();
            }
        });
        Ok(())
    }

    /// Why one of the processes has failed; `None`: none has.
    pub fn failed(&self) -> Option<String> {
        self.board.state().failed.clone()
    }

    /// Why what is under way may never end: one of the processes has failed, or has gone where all are wanted. `None`:
    /// it will end.
    pub fn gone(&self) -> Option<String> {
        let state = self.board.state();
        let ended = || state.ended.first().map(|rank| format!("rank {rank} has ended while others are in a step"));
        state.failed.clone().or_else(ended)
    }

    /// Whether what waits for others may wait for ever: somebody has failed, or this process is failing by a panic, which
    /// all are told of here.
    pub fn lost(&self) -> bool {
        if std::thread::panicking() {
            self.fail(PANICKED);
        }
        self.failed().is_some()
    }

    /// Tells everyone that this process has failed, unless they know of a failure.
    pub fn fail(&self, why: &str) {
        let mut state = self.board.state();
        if state.failed.is_none() {
            let why = format!("rank {}: {why}", self.rank);
            state.failed = Some(why.clone());
            drop(state);
            tell(&self.links, None, &why);
            self.board.changed.notify_all();
        }
    }

    /// Ends this process's part as if it were killed: nobody is told.
    pub fn vanish(self) {
        for (_, link) in &self.links {
            let _ = lock(link).shutdown(Shutdown::Both);
        }
    }

    /// Collects the bytes that all have brought, by rank, at rank 0; `None` elsewhere.
    pub fn gather(&self, own: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>> {
        if self.rank > 0 {
            self.say(0, &own)?;
            return Ok(None);
        }
        let mut all = vec![own];
        for rank in 1..self.world {
            all.push(self.hear(rank)?);
        }
        Ok(Some(all))
    }

    /// Waits here until rank 0 comes here too.
    pub fn together(&self) -> Result<()> {
        match self.rank {
            0 => (1..self.world).try_for_each(|rank| self.say(rank, &[])),
            _ => self.hear(0).map(drop),
        }
    }

    fn say(&self, to: u32, data: &[u8]) -> Result<()> {
        let (_, link) = self.links.iter().find(|(rank, _)| *rank == to).expect("a link to whom one speaks");
        let sent = send(&mut *lock(link), Frame::Data, data);
        sent.map_err(|e| {
            Error::device("join", self.failed().unwrap_or_else(|| format!("rank {to} does not listen: {e}")))
        })
    }

    fn hear(&self, from: u32) -> Result<Vec<u8>> {
        let until = Instant::now() + self.timeout;
        let mut state = self.board.state();
        loop {
            if let Some(data) = state.inbox.get_mut(&from).and_then(VecDeque::pop_front) {
                return Ok(data);
            }
            let left = until.saturating_duration_since(Instant::now());
            let why = match &state.failed {
                Some(why) => why.clone(),
                None if state.ended.contains(&from) => {
                    format!("rank {from} has ended before it said what is waited for")
                }
                None if left.is_zero() => {
                    format!("rank {from} has said nothing for {:.0} s ({TIMEOUT})", self.timeout.as_secs_f64())
                }
                None => {
                    let waited = self.board.changed.wait_timeout(state, left);
                    state = waited.map_or_else(|p| p.into_inner().0, |w| w.0);
                    continue;
                }
            };
            return Err(Error::device("join", why));
        }
    }
}

/// What the others are told of a process that panics.
const PANICKED: &str = "it has panicked: see what it printed";

impl Drop for Meeting {
    fn drop(&mut self) {
        let well = !std::thread::panicking();
        if !well {
            self.fail(PANICKED);
        }
        self.board.state().closing = true;
        self.board.changed.notify_all();
        for (_, link) in &self.links {
            let mut link = lock(link);
            if well {
                let _ = send(&mut *link, Frame::Bye, &[]);
            }
            let _ = link.shutdown(Shutdown::Write);
        }
    }
}

fn lock(link: &Mutex<TcpStream>) -> MutexGuard<'_, TcpStream> {
    link.lock().unwrap_or_else(|p| p.into_inner())
}

/// Tells the ranks of all links but `but` why something failed.
fn tell(links: &[Link], but: Option<u32>, why: &str) {
    for (_, link) in links.iter().filter(|(rank, _)| Some(*rank) != but) {
        let _ = send(&mut *lock(link), Frame::Failed, why.as_bytes());
    }
}

/// Takes what comes from a rank, until it is done or gone. Rank 0 passes failures on.
fn hear(mut stream: TcpStream, peer: u32, board: &Board, links: &[Link]) {
    loop {
        let heard = receive(&mut stream);
        let mut state = board.state();
        if state.closing {
            return;
        }
        let why = match heard {
            Ok((Frame::Ping, _)) => continue,
            Ok((Frame::Data, data)) => {
                state.inbox.entry(peer).or_default().push_back(data);
                board.changed.notify_all();
                continue;
            }
            Ok((Frame::Bye, _)) => {
                state.ended.push(peer);
                board.changed.notify_all();
                return;
            }
            Ok((Frame::Failed, why)) => String::from_utf8_lossy(&why).into_owned(),
            Ok((other, _)) => format!("rank {peer} says {other:?} out of turn"),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                format!("rank {peer} has not been heard of for {} s", SILENCE.as_secs())
            }
            Err(_) => format!("rank {peer} has ended without a word: see what it printed"),
        };
        if state.failed.is_none() {
            // Before this process knows: it ends then, and its end would come first.
            tell(links, Some(peer), &why);
            state.failed = Some(why);
        }
        drop(state);
        board.changed.notify_all();
        return;
    }
}

type Streams = Vec<(u32, TcpStream)>;

/// Rank 0: waits until all are there, and holds what they say against what it is itself.
fn gathered(
    own: &Hello,
    port: u16,
    until: Instant,
    shared: &dyn Fn() -> Result<Vec<u8>>,
) -> Result<(Streams, Vec<u8>)> {
    let mut all: BTreeMap<u32, (TcpStream, Hello)> = BTreeMap::new();
    let met = everyone(own, port, until, &mut all).and_then(|()| shared());
    for (stream, _) in all.values_mut() {
        let _ = match &met {
            Ok(data) => send(stream, Frame::Welcome, data),
            Err(why) => send(stream, Frame::Failed, format!("rank 0: {why}").as_bytes()),
        };
    }
    let shared = met?;
    Ok((all.into_iter().map(|(rank, (stream, _))| (rank, stream)).collect(), shared))
}

/// Waits until everyone has come. Once something is wrong all that come are told of it, and those that are still to
/// come are waited for a little longer.
fn everyone(own: &Hello, port: u16, until: Instant, all: &mut BTreeMap<u32, (TcpStream, Hello)>) -> Result<()> {
    if own.world == 1 {
        return Ok(());
    }
    let fail = |why: String| Err(Error::device("join", why));
    let listeners = match listen(port, until.min(Instant::now() + BUSY)) {
        Ok(listeners) => listeners,
        Err(e) => {
            return fail(format!(
                "port {port} cannot be listened on ({e}): is there another rank 0? else set FORETRAIN_PORT"
            ));
        }
    };
    let trouble = own.trouble.as_ref();
    let (mut until, mut come, mut wrong) = (until, 0, trouble.map(|why| format!("it can take no part: {why}")));
    while come + 1 < own.world {
        if Instant::now() > until {
            return fail(wrong.unwrap_or_else(|| missing(own, all)));
        }
        let Some((mut stream, from)) = listeners.iter().find_map(|listener| listener.accept().ok()) else {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        let left = until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(100), SILENCE);
        let _ = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(left)));
        let _ = stream.set_nodelay(true);
        // Strangers are let go.
        let Ok((Frame::Hello, hello)) = receive(&mut stream) else { continue };
        let Ok(hello) = serde_json::from_slice::<Hello>(&hello) else { continue };
        come += 1;
        if wrong.is_none()
            && let Some(why) = disagrees(own, &hello).or_else(|| twice(&hello, all))
        {
            wrong = Some(format!("{why} (from {})", from.ip().to_canonical()));
            until = until.min(Instant::now() + LATE);
        }
        match &wrong {
            Some(why) => drop(send(&mut stream, Frame::Failed, format!("rank 0: {why}").as_bytes())),
            None => drop(all.insert(hello.rank, (stream, hello))),
        }
    }
    wrong.map_or(Ok(()), fail)
}

/// The ranks that have not come, in words.
fn missing(own: &Hello, all: &BTreeMap<u32, (TcpStream, Hello)>) -> String {
    let missing: Vec<String> = (1..own.world).filter(|r| !all.contains_key(r)).map(|r| r.to_string()).collect();
    let (few, more) = (missing[..missing.len().min(8)].join(", "), missing.len().saturating_sub(8));
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("of {} processes those of ranks {few}{more} have not come in time ({TIMEOUT})", own.world)
}

fn twice(hello: &Hello, all: &BTreeMap<u32, (TcpStream, Hello)>) -> Option<String> {
    let (_, other) = all.get(&hello.rank)?;
    Some(format!("two processes say that they are rank {}: {} and {}", hello.rank, other.place, hello.place))
}

/// On all addresses of this machine, old and new: where the system takes the new ones' listener for both, the other one
/// finds the port taken. A launcher's port may be one that connections leave from: one that is about to close holds it for
/// a moment.
fn listen(port: u16, until: Instant) -> std::io::Result<Vec<TcpListener>> {
    let bind = |address: &str| {
        let listener = TcpListener::bind((address, port))?;
        listener.set_nonblocking(true).map(|()| listener)
    };
    loop {
        let (new, old) = (bind("::"), bind("0.0.0.0"));
        match (new, old) {
            (Ok(new), old) => return Ok([Ok(new), old].into_iter().flatten().collect()),
            // A system without IPv6 addresses.
            (Err(e), Ok(old)) if e.kind() != ErrorKind::AddrInUse => return Ok(vec![old]),
            (_, Err(e)) if e.kind() != ErrorKind::AddrInUse || Instant::now() > until => return Err(e),
            (_, Ok(old)) if Instant::now() > until => return Ok(vec![old]),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Connects to `at`, unless the connection has met itself: a port that nobody listens on yet may be taken for the near
/// end of the connection that looks for it, and TCP joins the two.
fn reach(at: &SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(at, Duration::from_secs(5))?;
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// Connects to the first address that answers: a name may have some at which nobody listens, as localhost has ::1
/// before 127.0.0.1.
fn reach_any(all: &[SocketAddr]) -> std::io::Result<TcpStream> {
    let mut tried = Err(ErrorKind::AddrNotAvailable.into());
    for at in all {
        tried = reach(at);
        if tried.is_ok() {
            break;
        }
    }
    tried
}

/// Why a process does not fit rank 0, in words; `None`: it does.
fn disagrees(own: &Hello, other: &Hello) -> Option<String> {
    let who = format!("rank {} ({})", other.rank, other.place);
    let differ =
        |what: &str, theirs: &str, ours: &str| Some(format!("{who} has {what} {theirs}, and rank 0 has {ours}"));
    if other.world != own.world {
        return differ("a world of", &other.world.to_string(), &own.world.to_string());
    }
    if other.rank == 0 || other.rank >= own.world {
        return Some(format!("{who} comes to rank 0, and the ranks that come are 1 to {}", own.world - 1));
    }
    if let Some(why) = &other.trouble {
        return Some(format!("{who} can take no part: {why}"));
    }
    if other.foretrain != own.foretrain {
        return differ("foretrain", &other.foretrain, &own.foretrain);
    }
    if other.nccl != own.nccl {
        return differ("NCCL", &version(other.nccl), &version(own.nccl));
    }
    (other.plan != own.plan)
        .then(|| format!("{who} has another plan than rank 0: give all the same flags, or one --plan"))
}

/// NCCL's version in words: 23007 is 2.30.7.
pub fn version(nccl: i32) -> String {
    format!("{}.{}.{}", nccl / 10_000, nccl % 10_000 / 100, nccl % 100)
}

/// How often a connection that is reset before it is answered is tried again.
const MOST_RESETS: u32 = 3;

/// Any rank but 0: goes to rank 0 until it is there.
fn come(own: &Hello, (host, port): &(String, u16), until: Instant) -> Result<(TcpStream, Vec<u8>)> {
    let (mut last, mut resets) = (String::from("nobody answers"), 0);
    let fail = |why: String| Err(Error::device("join", why));
    while Instant::now() < until {
        let found = (host.as_str(), *port).to_socket_addrs().map(|all| all.collect::<Vec<_>>());
        let tried = found.and_then(|all| reach_any(&all));
        let mut stream = match tried {
            Ok(stream) => stream,
            Err(e) => {
                last = e.to_string();
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let hello = serde_json::to_vec(own).expect("plain data");
        // The others may still be on their way, and rank 0 says so if they never come.
        let left = until.saturating_duration_since(Instant::now()) + PING;
        let answer = stream
            .set_read_timeout(Some(left))
            .and_then(|()| send(&mut stream, Frame::Hello, &hello))
            .and_then(|()| receive(&mut stream));
        return match answer {
            Ok((Frame::Welcome, shared)) => Ok((stream, shared)),
            Ok((Frame::Failed, why)) => fail(String::from_utf8_lossy(&why).into_owned()),
            Ok(_) => fail(format!("what listens at {host}:{port} is no rank 0")),
            // Another process had the port before rank 0, and has left it with this connection in its queue.
            Err(e) if e.kind() == ErrorKind::ConnectionReset && resets < MOST_RESETS => {
                (last, resets) = (e.to_string(), resets + 1);
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(e) => fail(format!("rank 0 at {host}:{port} has let rank {} go: {e}", own.rank)),
        };
    }
    fail(format!("rank 0 is not at {host}:{port} ({last}); is it started, and MASTER_ADDR its node? ({TIMEOUT})"))
}

impl Hello {
    pub fn new(process: &Process, plan: &str, nccl: i32, gpu: &str) -> Hello {
        let node = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Hello {
            rank: process.rank,
            world: process.world,
            foretrain: env!("CARGO_PKG_VERSION").into(),
            nccl,
            plan: plan.into(),
            place: format!("{} GPU {} {gpu}", node.trim(), process.local).trim().into(),
            trouble: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 0 is found at a name's second address, and listens on old and new ones.
    #[test]
    fn every_address_of_a_name_is_tried() {
        let here = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let listeners = listen(here.port(), Instant::now()).unwrap();
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        assert!(reach_any(&[nobody, here]).is_ok() && reach_any(&[nobody]).is_err() && reach_any(&[]).is_err());
        let new = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, here.port()));
        assert!(TcpListener::bind("[::1]:0").is_err() || reach(&new).is_ok(), "{listeners:?}");
    }

    /// Of some 14,000 connections in a row to a port that connections leave from, and that nobody listens on, one meets
    /// itself.
    #[test]
    fn a_connection_that_meets_itself_is_none() {
        // Connections leave from even ports, and what asks for any port to listen on gets an odd one (Linux).
        let odd = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let free = (odd & !1..u16::MAX).step_by(2).find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
        let nobody = SocketAddr::from(([127, 0, 0, 1], free.unwrap()));
        for _ in 0..40_000 {
            assert!(reach(&nobody).is_err());
        }
    }
}
