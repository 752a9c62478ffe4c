//! A plan on any backend, from host tensors to host tensors.

use kernels::{Buffers, InputError, Inputs, Outputs, Plan, PlanError, Problem, Tensor, TensorError};
use ptx::Backend;
use thiserror::Error;

/// A plan that did not run to its end.
#[derive(Debug, Error)]
pub enum ComputeError<E> {
    /// The plan refuses the addresses.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The inputs are not the problem's.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Host memory does not suffice.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The backend refused or failed.
    #[error(transparent)]
    Backend(E),
}

/// A call's tensors in a backend's memory.
#[derive(Debug, Default)]
pub struct Resident {
    /// Where the plan's kernels find them.
    pub buffers: Buffers,
    /// What to give back.
    allocations: Vec<u64>,
}

impl Resident {
    /// Brings the inputs, workspaces, and outputs that are NaN: what a kernel does not write shows.
    ///
    /// # Errors
    /// When the inputs are not the problem's or there is no room; what was allocated is given back.
    pub fn new<B: Backend>(
        backend: &mut B,
        plan: &Plan,
        problem: &Problem,
        inputs: &Inputs,
    ) -> Result<Self, ComputeError<B::Error>> {
        inputs.check(problem)?;
        let mut resident = Self::default();
        match resident.fill(backend, plan, problem, inputs) {
            Ok(()) => Ok(resident),
            Err(error) => {
                // The error that is already known tells more than what this could add.
                let _ = resident.free(backend);
                Err(error)
            }
        }
    }

    fn fill<B: Backend>(
        &mut self,
        backend: &mut B,
        plan: &Plan,
        problem: &Problem,
        inputs: &Inputs,
    ) -> Result<(), ComputeError<B::Error>> {
        let outputs = Outputs::nan(problem)?;
        let Buffers { q, k, v, out, lse, .. } = &mut self.buffers;
        let tensors = [(q, &inputs.q), (k, &inputs.k), (v, &inputs.v), (out, &outputs.out), (lse, &outputs.lse)];
        for (address, tensor) in tensors {
            let storage = backend.upload(tensor.storage()).map_err(ComputeError::Backend)?;
            self.allocations.push(storage);
            *address = storage + (tensor.offset() * tensor.dtype().bytes()) as u64;
        }
        if let Some(descales) = &inputs.descales {
            let Buffers { q_descale, k_descale, v_descale, .. } = &mut self.buffers;
            for (address, tensor) in [(q_descale, &descales.q), (k_descale, &descales.k), (v_descale, &descales.v)] {
                *address = backend.upload(&tensor.to_bytes()?).map_err(ComputeError::Backend)?;
                self.allocations.push(*address);
            }
        }
        if let Some(varlen) = &problem.varlen {
            let Buffers { cu_seqlens_q, cu_seqlens_k, .. } = &mut self.buffers;
            for (address, offsets) in [(cu_seqlens_q, &varlen.cu_seqlens_q), (cu_seqlens_k, &varlen.cu_seqlens_k)] {
                *address = backend.upload(bytemuck::cast_slice(offsets)).map_err(ComputeError::Backend)?;
                self.allocations.push(*address);
            }
        }
        if let Some(slopes) = &problem.alibi_slopes {
            self.buffers.alibi_slopes = backend.upload(bytemuck::cast_slice(slopes)).map_err(ComputeError::Backend)?;
            self.allocations.push(self.buffers.alibi_slopes);
        }
        if let Some(new) = &inputs.new {
            let Buffers { k_new, v_new, rotary_cos, rotary_sin, .. } = &mut self.buffers;
            let rotary = new.rotary.iter().flatten().zip([rotary_cos, rotary_sin]);
            for (tensor, address) in [(&new.k, k_new), (&new.v, v_new)].into_iter().chain(rotary) {
                let storage = backend.upload(tensor.storage()).map_err(ComputeError::Backend)?;
                self.allocations.push(storage);
                *address = storage + (tensor.offset() * tensor.dtype().bytes()) as u64;
            }
        }
        if let Some(cache) = &problem.cache {
            let Buffers { cache_seqlens, cache_leftpad, cache_batch_idx, block_table, .. } = &mut self.buffers;
            let lists = [
                (cache_seqlens, cache.seqlens.as_ref()),
                (cache_leftpad, cache.leftpad.as_ref()),
                (cache_batch_idx, cache.batch_idx.as_ref()),
                (block_table, cache.pages.as_ref().map(|pages| &pages.table)),
            ];
            for (address, list) in lists {
                let Some(list) = list else { continue };
                *address = backend.upload(bytemuck::cast_slice(list)).map_err(ComputeError::Backend)?;
                self.allocations.push(*address);
            }
        }
        for workspace in &plan.workspaces {
            let address = match workspace.zeroed {
                true => backend.upload(&vec![0; workspace.bytes as usize]),
                false => backend.alloc(workspace.bytes),
            };
            let address = address.map_err(ComputeError::Backend)?;
            self.allocations.push(address);
            self.buffers.workspaces.push(address);
        }
        Ok(())
    }

    /// Copies the outputs out.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn outputs<B: Backend>(&self, backend: &mut B, problem: &Problem) -> Result<Outputs, ComputeError<B::Error>> {
        let Outputs { out, lse } = Outputs::nan(problem)?;
        let mut read = |address: u64, tensor: &Tensor| -> Result<Tensor, ComputeError<B::Error>> {
            let bytes = (tensor.len() * tensor.dtype().bytes()) as u64;
            let bytes = backend.read(address, bytes).map_err(ComputeError::Backend)?;
            Ok(Tensor::from_bytes(tensor.dtype(), tensor.shape(), bytes)?)
        };
        Ok(Outputs { out: read(self.buffers.out, &out)?, lse: read(self.buffers.lse, &lse)? })
    }

    /// Gives the memory back.
    ///
    /// # Errors
    /// The first one of the backend; the rest is given back all the same.
    pub fn free<B: Backend>(self, backend: &mut B) -> Result<(), B::Error> {
        let freed = self.allocations.into_iter().map(|address| backend.free(address));
        freed.fold(Ok(()), Result::and)
    }
}

/// What a plan computed.
#[derive(Debug)]
pub struct Computed<R> {
    /// `out` and `lse`.
    pub outputs: Outputs,
    /// What each launch reported, in order.
    pub reports: Vec<R>,
}

/// Runs a plan on host tensors.
///
/// # Errors
/// When the inputs are not the problem's, there is no room, or a launch fails.
pub fn compute<B: Backend>(
    backend: &mut B,
    plan: &Plan,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<Computed<B::Report>, ComputeError<B::Error>> {
    let resident = Resident::new(backend, plan, problem, inputs)?;
    let mut run = || {
        let launches = plan.launches(&resident.buffers, backend.multiprocessors())?;
        let reports = launches.iter().map(|launch| backend.launch(launch).map_err(ComputeError::Backend));
        let reports = reports.collect::<Result<_, _>>()?;
        Ok(Computed { outputs: resident.outputs(backend, problem)?, reports })
    };
    let computed = run();
    let freed = resident.free(backend).map_err(ComputeError::Backend);
    computed.and_then(|computed| freed.map(|()| computed))
}
