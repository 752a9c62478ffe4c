//! Time on a GPU, by events.

use ptx::Backend;
use serde::Serialize;

use crate::clocks::Clocks;
use crate::error::Error;
use crate::graph::Graph;
use crate::stream::Stream;

/// How something is timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimingOptions {
    /// Milliseconds of work before the first sample: clocks rise, and modules are loaded.
    pub warmup_ms: f64,
    /// Milliseconds of work that are sampled, about.
    pub budget_ms: f64,
    /// The fewest and the most samples.
    pub samples: (usize, usize),
    /// Whether the L2 cache is overwritten before each sample.
    pub flush_l2: bool,
    /// Whether the work is recorded and replayed as a graph, so that launches leave no gaps.
    pub graph: bool,
}

impl Default for TimingOptions {
    fn default() -> Self {
        Self { warmup_ms: 50.0, budget_ms: 300.0, samples: (10, 300), flush_l2: false, graph: false }
    }
}

/// What the samples say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// The middle sample, in milliseconds.
    pub median_ms: f64,
    /// Nine tenths of the samples took at least this long.
    pub p10_ms: f64,
    /// Nine tenths of the samples took at most this long.
    pub p90_ms: f64,
    /// How many there are.
    pub samples: usize,
    /// Whether the L2 cache was overwritten before each.
    pub flush_l2: bool,
    /// Whether a graph was replayed.
    pub graph: bool,
    /// The GPU right after the last sample.
    pub clocks: Option<Clocks>,
}

/// The value below which that share of the sorted samples lies, between neighbours if need be.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = share * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Samples that are enqueued before any of them is waited for.
const BATCH: usize = 32;

/// Times what `work` enqueues; it gets the sample's number, so that it can rotate among inputs.
///
/// # Errors
/// Those of `work` and the driver's.
pub fn time(
    stream: &mut Stream,
    options: &TimingOptions,
    mut work: impl FnMut(&mut Stream, usize) -> Result<(), Error>,
) -> Result<Timing, Error> {
    // Twice the cache, so that whatever its replacement policy nothing of the work is left in it.
    let flushed = 2 * stream.context().device().l2_bytes;
    let flush = if options.flush_l2 { Some(stream.alloc(flushed)?) } else { None };
    let result = sample(stream, options, flush.map(|address| (address, flushed)), &mut work);
    if let Some(address) = flush {
        let freed = stream.free(address);
        return result.and_then(|timing| freed.map(|()| timing));
    }
    result
}

fn sample(
    stream: &mut Stream,
    options: &TimingOptions,
    flush: Option<(u64, u64)>,
    work: &mut impl FnMut(&mut Stream, usize) -> Result<(), Error>,
) -> Result<Timing, Error> {
    let graph = if options.graph { Some(Graph::record(stream, |stream| work(stream, 0))?) } else { None };
    let mut samples: Vec<f64> = Vec::new();
    let mut batch = |stream: &mut Stream, first: usize, count: usize| -> Result<Vec<f64>, Error> {
        let mut marks = Vec::with_capacity(count);
        for index in first..first + count {
            if let Some((address, bytes)) = flush {
                stream.fill(address, bytes, index as u8)?;
            }
            let (start, end) = (stream.event()?, stream.event()?);
            stream.record(&start)?;
            match &graph {
                Some(graph) => graph.replay(stream)?,
                None => work(stream, index)?,
            }
            stream.record(&end)?;
            marks.push((start, end));
        }
        stream.synchronize()?;
        marks.iter().map(|(start, end)| end.since(start)).collect()
    };
    // The first one loads and allocates; it says nothing about time.
    batch(stream, 0, 1)?;
    let (mut warm, mut index) = (0.0, 1);
    while warm < options.warmup_ms && index < 1000 {
        warm += batch(stream, index, 1)?[0].max(0.01);
        index += 1;
    }
    let (least, most) = options.samples;
    let mut total = 0.0;
    while samples.len() < most && (samples.len() < least || total < options.budget_ms) {
        // A batch that is not waited for in between hides what a launch costs the host.
        let one = samples.last().copied().unwrap_or(options.budget_ms / least.max(1) as f64).max(1e-3);
        let wanted = ((options.budget_ms - total) / one).ceil().max(1.0) as usize;
        let count = wanted.max(least.saturating_sub(samples.len())).min(BATCH).min(most - samples.len());
        let taken = batch(stream, index, count)?;
        index += count;
        total += taken.iter().sum::<f64>();
        samples.extend(taken);
    }
    samples.sort_by(f64::total_cmp);
    Ok(Timing {
        median_ms: quantile(&samples, 0.5),
        p10_ms: quantile(&samples, 0.1),
        p90_ms: quantile(&samples, 0.9),
        samples: samples.len(),
        flush_l2: options.flush_l2,
        graph: options.graph,
        clocks: Clocks::read(stream.context().device()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_samples() {
        let sorted = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(quantile(&sorted, 0.5), 2.5);
        assert_eq!(quantile(&sorted, 0.0), 1.0);
        assert_eq!(quantile(&sorted, 1.0), 4.0);
        assert!((quantile(&sorted, 0.1) - 1.3).abs() < 1e-12);
        assert!(quantile(&[], 0.5).is_nan());
    }
}
