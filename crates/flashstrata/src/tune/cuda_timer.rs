//! A GPU as what takes time.

use kernels::{Inputs, Problem, TensorError};

use crate::attention::{self, Attention, Operands};
use crate::error::Error;
use crate::planner::Plan;
use crate::stream::{Backing, DeviceBuffer, Stream, locked};
use crate::tune::Timer;

/// Events on a stream around calls on normal, contiguous inputs, which may be in the L2 cache from one call to the next.
#[derive(Debug)]
pub struct CudaTimer {
    stream: Stream,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
    cu_seqlens: Option<[DeviceBuffer; 2]>,
    alibi_slopes: Option<DeviceBuffer>,
    /// Those that loaded, each with the calls that a sample takes.
    loaded: Vec<(Attention, usize)>,
}

/// A sample takes about this long at least: a short kernel is called several times.
const SAMPLE_MS: f64 = 0.5;
/// So many times at most.
const MOST_CALLS: usize = 64;

impl CudaTimer {
    /// Draws inputs for a problem and brings them to the stream's GPU.
    ///
    /// # Errors
    /// When host or device memory does not suffice, or the stream is the emulator's, which has no clock.
    pub fn new(stream: &Stream, problem: &Problem) -> Result<CudaTimer, Error> {
        if stream.device().context().is_none() {
            return Err(Error::NoGpu { what: "a clock" });
        }
        let Inputs { q, k, v, .. } = Inputs::randn(problem, 0)?;
        let bytes = |shape: Vec<usize>, size: usize| shape.into_iter().product::<usize>() as u64 * size as u64;
        let upload = |tensor: &kernels::Tensor| -> Result<DeviceBuffer, Error> {
            let bytes: Result<Vec<u8>, TensorError> = tensor.to_bytes();
            stream.upload(&bytes?)
        };
        let cu_seqlens = match &problem.varlen {
            Some(varlen) => Some([stream.upload(&varlen.cu_seqlens_q)?, stream.upload(&varlen.cu_seqlens_k)?]),
            None => None,
        };
        Ok(CudaTimer {
            q: upload(&q)?,
            k: upload(&k)?,
            v: upload(&v)?,
            out: stream.alloc(bytes(problem.out_shape(), problem.dtype.bytes()))?,
            lse: stream.alloc(bytes(problem.lse_shape(), 4))?,
            cu_seqlens,
            alibi_slopes: problem.alibi_slopes.as_ref().map(|slopes| stream.upload(slopes)).transpose()?,
            stream: stream.clone(),
            loaded: Vec::new(),
        })
    }
}

impl Timer for CudaTimer {
    type Error = Error;

    fn load(&mut self, plan: &Plan) -> Result<(), Error> {
        let attention = self.stream.device().load(plan.clone())?;
        self.stream.reserve(plan)?;
        self.loaded.push((attention, 1));
        Ok(())
    }

    fn sample(&mut self, candidate: usize) -> Result<f64, Error> {
        let CudaTimer { stream, q, k, v, out, lse, cu_seqlens, alibi_slopes, loaded } = self;
        let Some((attention, calls)) = loaded.get_mut(candidate) else { return Ok(f64::NAN) };
        let mut operands = Operands::new(&*q, &*k, &*v, out, lse);
        if let Some([q, k]) = cu_seqlens {
            operands = operands.cu_seqlens(&*q, &*k);
        }
        if let Some(slopes) = alibi_slopes {
            operands = operands.alibi_slopes(&*slopes);
        }
        let mut inner = locked(&stream.inner);
        let ready = attention::ready(stream, &mut inner, attention, &operands)?;
        let mark = |inner: &mut crate::stream::Inner| match &mut inner.backing {
            Backing::Cuda(stream) => {
                let event = stream.event()?;
                stream.record(&event)?;
                Ok(event)
            }
            Backing::Cpu(_) | Backing::Emulator(_) => Err(Error::NoGpu { what: "a clock" }),
        };
        let begin = mark(&mut inner)?;
        for _ in 0..*calls {
            attention::start(&mut inner, &ready)?;
        }
        let end = mark(&mut inner)?;
        drop(inner);
        stream.synchronize()?;
        let ms = end.since(&begin)? / *calls as f64;
        *calls = ((SAMPLE_MS / ms.max(1e-3)).ceil() as usize).clamp(1, MOST_CALLS);
        Ok(ms)
    }
}
