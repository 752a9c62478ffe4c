//! Timing candidates against each other.

use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

use crate::planner::Plan;
use crate::tune::{Candidates, Entry, Key};

/// How tuning is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneOptions {
    /// The most configurations of a generation that are timed, beside the default.
    pub per_stratum: usize,
    /// Samples of each; those that fall behind get fewer.
    pub rounds: usize,
}

impl Default for TuneOptions {
    fn default() -> Self {
        Self { per_stratum: 10, rounds: 15 }
    }
}

/// What takes time: a GPU, or in a test something that stands for it.
pub trait Timer {
    /// Why something was not timed.
    type Error: std::error::Error;

    /// Makes a candidate ready: compiles it, brings its memory. Those that load are numbered from 0 in order.
    ///
    /// # Errors
    /// When it cannot run: it is then left out.
    fn load(&mut self, plan: &Plan) -> Result<(), Self::Error>;

    /// Milliseconds of one call of a candidate that was loaded.
    ///
    /// # Errors
    /// When it fails: tuning ends.
    fn sample(&mut self, candidate: usize) -> Result<f64, Self::Error>;
}

/// How far tuning is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Steps done: candidates loaded and samples taken.
    pub done: usize,
    /// Steps there are at most.
    pub of: usize,
}

/// What a caller may see and stop.
#[derive(Clone, Copy, Default)]
pub struct Watch<'a> {
    /// Set to true by someone else to stop.
    pub cancel: Option<&'a AtomicBool>,
    /// Called after each step.
    pub progress: Option<&'a dyn Fn(Progress)>,
}

/// Why nothing came of tuning.
#[derive(Debug, Error)]
pub enum TuneError<E> {
    /// Without a GPU and its driver there is nothing to measure.
    #[error("{gpu} has no driver here: only a GPU that is there can be tuned for")]
    NoDriver {
        /// The GPU that was planned for.
        gpu: String,
    },
    /// [`Candidates::kept`] is empty.
    #[error("there is no candidate: at least what is taken by default must be timed")]
    NoCandidate,
    /// What is taken by default does not run.
    #[error("{candidate} does not run: {source}")]
    Default {
        /// Which.
        candidate: String,
        /// Why.
        source: E,
    },
    /// A sample failed.
    #[error("{candidate}: {source}")]
    Sample {
        /// Whose.
        candidate: String,
        /// Why.
        source: E,
    },
    /// [`Watch::cancel`] was set.
    #[error("cancelled")]
    Cancelled,
}

/// What one candidate took.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Its place in [`Candidates::kept`].
    pub candidate: usize,
    /// The median of its samples, in milliseconds; or why it was left out.
    pub outcome: Result<f64, String>,
}

/// What came of tuning.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuned {
    /// What is to be stored.
    pub entry: Entry,
    /// Each candidate, in order.
    pub measured: Vec<Measured>,
}

/// After this many rounds, those that are behind are no longer timed.
const FAIR_ROUNDS: usize = 3;
/// So far behind the fastest.
const BEHIND: f64 = 1.15;
/// What is taken by default is kept unless another is faster by this much: less is noise.
const GAIN: f64 = 1.01;

/// Times the candidates in turn, so that a change of clocks meets all of them, and picks the one of the least median.
///
/// # Errors
/// When there is no GPU to tune for, its default does not run, a sample fails, or the caller stops it.
pub fn tune<T: Timer>(
    candidates: &Candidates,
    timer: &mut T,
    options: &TuneOptions,
    watch: Watch<'_>,
) -> Result<Tuned, TuneError<T::Error>> {
    let kept = &candidates.kept;
    let Some(default) = kept.first() else { return Err(TuneError::NoCandidate) };
    let hardware = &default.plan.hardware;
    let key = Key::new(hardware, &default.plan.problem);
    let Some(key) = key else { return Err(TuneError::NoDriver { gpu: hardware.name.clone() }) };
    let rounds = options.rounds.max(1);
    let (mut done, of) = (0, kept.len() * (2 + rounds));
    let step = |done: usize| {
        if let Some(progress) = watch.progress {
            progress(Progress { done, of });
        }
        match watch.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
            true => Err(TuneError::Cancelled),
            false => Ok(()),
        }
    };
    let mut measured: Vec<Measured> = Vec::new();
    // The number by which the timer knows each.
    let mut loaded = Vec::new();
    for (index, candidate) in kept.iter().enumerate() {
        match timer.load(&candidate.plan) {
            Ok(()) => loaded.push(index),
            Err(source) if index == 0 => return Err(TuneError::Default { candidate: candidate.to_string(), source }),
            Err(error) => measured.push(Measured { candidate: index, outcome: Err(error.to_string()) }),
        }
        done += 1;
        step(done)?;
    }
    let mut sample = |number: usize| {
        let named = |source| TuneError::Sample { candidate: kept[loaded[number]].to_string(), source };
        timer.sample(number).map_err(named)
    };
    // The first one loads and warms.
    for number in 0..loaded.len() {
        sample(number)?;
        done += 1;
        step(done)?;
    }
    let mut samples = vec![Vec::new(); loaded.len()];
    let mut running: Vec<usize> = (0..loaded.len()).collect();
    for round in 0..rounds {
        // Each round begins with another.
        if running.len() > 2 {
            running.rotate_left(1);
        }
        for &number in &running {
            samples[number].push(sample(number)?);
            done += 1;
            step(done)?;
        }
        if round + 1 >= FAIR_ROUNDS {
            let medians: Vec<f64> = samples.iter().map(|samples| median(samples)).collect();
            let best = running.iter().map(|&number| medians[number]).fold(f64::INFINITY, f64::min);
            // What everything is compared with runs to the end.
            running.retain(|&number| number == 0 || medians[number] <= BEHIND * best);
        }
    }
    let medians: Vec<f64> = samples.iter().map(|samples| median(samples)).collect();
    let fastest = running.iter().copied().min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap_or(0);
    let chosen = if medians[0] > GAIN * medians[fastest] { fastest } else { 0 };
    measured.extend(medians.iter().zip(&loaded).map(|(&ms, &candidate)| Measured { candidate, outcome: Ok(ms) }));
    measured.sort_by_key(|one| one.candidate);
    let plan = &kept[loaded[chosen]].plan;
    let entry = Entry {
        key,
        problem: plan.problem.to_string(),
        stratum: plan.stratum(),
        tiles: plan.tiles(),
        median_ms: medians[chosen],
        default_ms: medians[0],
        timed: loaded.len(),
    };
    Ok(Tuned { entry, measured })
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use kernels::{Dtype, Layout, ProblemSpec};

    use super::*;
    use crate::Planner;
    use crate::tune::candidates;
    use crate::tune::tests::h200;

    fn found() -> Candidates {
        let problem = ProblemSpec::new(2, 16, 1000, 128).dtype(Dtype::Bf16).build().unwrap();
        candidates(&Planner::new(h200("580.1")), &problem, &Layout::contiguous(&problem), &TuneOptions::default())
            .unwrap()
    }

    #[derive(Debug, Error)]
    #[error("{0}")]
    struct Reason(&'static str);

    /// Takes what a function of the candidate and its sample's number says.
    struct Fake<F> {
        time: F,
        refused: Vec<u32>,
        loaded: Vec<u32>,
        taken: Vec<usize>,
        order: Vec<usize>,
    }

    impl<F: Fn(u32, usize) -> Result<f64, Reason>> Fake<F> {
        fn new(time: F) -> Self {
            Fake { time, refused: Vec::new(), loaded: Vec::new(), taken: Vec::new(), order: Vec::new() }
        }
    }

    impl<F: Fn(u32, usize) -> Result<f64, Reason>> Timer for Fake<F> {
        type Error = Reason;
        fn load(&mut self, plan: &Plan) -> Result<(), Reason> {
            let block_kv = plan.tiles().block_kv;
            if self.refused.contains(&block_kv) {
                return Err(Reason("does not compile"));
            }
            self.loaded.push(block_kv);
            self.taken.push(0);
            Ok(())
        }
        fn sample(&mut self, candidate: usize) -> Result<f64, Reason> {
            self.taken[candidate] += 1;
            self.order.push(candidate);
            (self.time)(self.loaded[candidate], self.taken[candidate])
        }
    }

    #[test]
    fn the_least_median_wins_whatever_single_samples_say() {
        let found = found();
        let target = found.kept.last().unwrap().plan.tiles().block_kv;
        // The first sample of each is slow, and now and then one is far off.
        let time = |block_kv, sample| {
            let noise = if sample == 1 || sample % 5 == 0 { 40.0 } else { 0.0 };
            Ok(noise + if block_kv == target { 1.0 } else { 1.1 })
        };
        let mut timer = Fake::new(time);
        let Tuned { entry, measured } = tune(&found, &mut timer, &TuneOptions::default(), Watch::default()).unwrap();
        assert_eq!((entry.tiles.block_kv, entry.median_ms, entry.timed), (target, 1.0, found.kept.len()));
        assert_eq!(measured.len(), found.kept.len());
        // In turn: no candidate is sampled twice in a row.
        assert!(timer.order.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn those_behind_get_fewer_samples_and_the_default_stays() {
        let found = found();
        let default = found.kept[0].plan.tiles();
        let mut timer =
            Fake::new(|block_kv, _| Ok(if block_kv == default.block_kv { 2.0 } else { f64::from(block_kv) / 16.0 }));
        let options = TuneOptions::default();
        let Tuned { entry, measured } = tune(&found, &mut timer, &options, Watch::default()).unwrap();
        assert_eq!((entry.default_ms, timer.taken[0]), (2.0, 1 + options.rounds));
        assert!(timer.taken.iter().skip(1).any(|&taken| taken == 1 + FAIR_ROUNDS), "{:?}", timer.taken);
        assert!(measured.iter().all(|one| one.outcome.as_ref().is_ok_and(|&ms| ms >= entry.median_ms)));
        // Within the noise the default is kept.
        let mut timer = Fake::new(|block_kv, _| Ok(if block_kv == default.block_kv { 1.0 } else { 0.995 }));
        let entry = tune(&found, &mut timer, &options, Watch::default()).unwrap().entry;
        assert_eq!((entry.tiles, entry.median_ms), (default, 1.0));
    }

    #[test]
    fn what_does_not_load_is_left_out_and_said() {
        let found = found();
        let default = found.kept[0].plan.tiles().block_kv;
        let other =
            found.kept.iter().map(|one| one.plan.tiles().block_kv).find(|&block_kv| block_kv != default).unwrap();
        let mut timer = Fake { refused: vec![other], ..Fake::new(|_, _| Ok(1.0)) };
        let Tuned { entry, measured } = tune(&found, &mut timer, &TuneOptions::default(), Watch::default()).unwrap();
        let refused = measured.iter().filter(|one| one.outcome == Err("does not compile".into())).count();
        assert!(refused > 0 && entry.timed + refused == found.kept.len());
        let mut timer = Fake { refused: vec![default], ..Fake::new(|_, _| Ok(1.0)) };
        let error = tune(&found, &mut timer, &TuneOptions::default(), Watch::default()).unwrap_err().to_string();
        assert!(error.starts_with("v3 (block_q 128, ") && error.ends_with("does not run: does not compile"), "{error}");
        let mut timer = Fake::new(|_, sample| if sample < 4 { Ok(1.0) } else { Err(Reason("the GPU is lost")) });
        let error = tune(&found, &mut timer, &TuneOptions::default(), Watch::default()).unwrap_err().to_string();
        assert!(error.ends_with("): the GPU is lost"), "{error}");
    }

    #[test]
    fn it_can_be_watched_and_stopped() {
        let found = found();
        let (seen, cancel) = (RefCell::new(Vec::new()), AtomicBool::new(false));
        let progress = |progress: Progress| {
            seen.borrow_mut().push(progress.done);
            cancel.store(progress.done == 7, Ordering::Relaxed);
        };
        let watch = Watch { cancel: Some(&cancel), progress: Some(&progress) };
        let stopped = tune(&found, &mut Fake::new(|_, _| Ok(1.0)), &TuneOptions::default(), watch);
        assert!(matches!(stopped, Err(TuneError::Cancelled)));
        assert_eq!(*seen.borrow(), [1, 2, 3, 4, 5, 6, 7]);
        let last = Cell::new(None);
        let progress = |progress: Progress| last.set(Some(progress));
        let watch = Watch { cancel: None, progress: Some(&progress) };
        tune(&found, &mut Fake::new(|_, _| Ok(1.0)), &TuneOptions::default(), watch).unwrap();
        let Some(Progress { done, of }) = last.get() else { panic!("no progress") };
        assert_eq!(done, of);
    }

    #[test]
    fn without_a_driver_nothing_is_tuned() {
        let problem = ProblemSpec::new(1, 1, 64, 64).build().unwrap();
        let planner = Planner::new(arch::Gpu::find("T4").unwrap().into());
        let found = candidates(&planner, &problem, &Layout::contiguous(&problem), &TuneOptions::default()).unwrap();
        let error =
            tune(&found, &mut Fake::new(|_, _| Ok(1.0)), &TuneOptions::default(), Watch::default()).unwrap_err();
        assert_eq!(error.to_string(), "T4 has no driver here: only a GPU that is there can be tuned for");
    }
}
