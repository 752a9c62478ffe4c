//! Attention on the processor by candle and burn, as functions that Python can call.
//!
//! A call is prepared from tensors that are copied, then run as often as one likes, then freed.

use std::hint::black_box;

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::TensorData;
use burn_flex::FlexTensor;
use candle_core::{Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::bf16;

/// What a call is: all of it but the tensors' elements.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Shape {
    heads: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    head_dim: usize,
    causal: bool,
    bf16: bool,
}

/// A call that is ready to run.
pub struct Call(Box<dyn Fn() -> bool>);

/// A type of elements.
trait Element: Copy + candle_core::WithDType + burn_backend::Element + 'static {}
impl Element for f32 {}
impl Element for bf16 {}

impl Shape {
    fn rows(self, seqlen: usize) -> usize {
        self.heads * seqlen * self.head_dim
    }
}

/// # Safety
/// The tensors are of the shape: `[heads, seqlen, head_dim]`.
unsafe fn candle<T: Element>(shape: Shape, q: *const T, k: *const T, v: *const T, run: fn(&[Tensor; 3], Shape) -> bool) -> Call {
    let tensor = |from: *const T, seqlen: usize| {
        // SAFETY: as the caller says.
        let elements = unsafe { std::slice::from_raw_parts(from, shape.rows(seqlen)) };
        let tensor = Tensor::from_slice(elements, (1, shape.heads, seqlen, shape.head_dim), &Device::Cpu);
        tensor.and_then(|tensor| tensor.transpose(1, 2)?.contiguous()).expect("a tensor")
    };
    let tensors = [tensor(q, shape.seqlen_q), tensor(k, shape.seqlen_k), tensor(v, shape.seqlen_k)];
    Call(Box::new(move || run(&tensors, shape)))
}

fn run_candle<T: candle_core::WithDType + num_traits::Float>([q, k, v]: &[Tensor; 3], shape: Shape) -> bool {
    let mask = if shape.causal { AttnMask::causal() } else { AttnMask::None };
    let scale = (shape.head_dim as f32).sqrt().recip();
    black_box(flash_attn::<T>(q, k, v, scale, mask, None, None)).is_ok()
}

/// # Safety
/// The tensors are of the shape: `[heads, seqlen, head_dim]`.
unsafe fn burn<T: Element>(shape: Shape, q: *const T, k: *const T, v: *const T) -> Call {
    let tensor = |from: *const T, seqlen: usize| {
        // SAFETY: as the caller says.
        let elements = unsafe { std::slice::from_raw_parts(from, shape.rows(seqlen)) }.to_vec();
        FlexTensor::from_data(TensorData::new(elements, [1, shape.heads, seqlen, shape.head_dim]))
    };
    let (q, k, v) = (tensor(q, shape.seqlen_q), tensor(k, shape.seqlen_k), tensor(v, shape.seqlen_k));
    Call(Box::new(move || {
        let options = AttentionModuleOptions { is_causal: shape.causal, ..AttentionModuleOptions::default() };
        black_box(burn_flex::ops::attention::attention(q.clone(), k.clone(), v.clone(), None, None, options));
        true
    }))
}

/// candle-nn's flash attention.
///
/// # Safety
/// The tensors are of the shape, `[heads, seqlen, head_dim]`, and of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prepare_candle(shape: Shape, q: *const u8, k: *const u8, v: *const u8) -> *mut Call {
    // SAFETY: as the caller says.
    let call = unsafe {
        match shape.bf16 {
            true => candle::<bf16>(shape, q.cast(), k.cast(), v.cast(), run_candle::<bf16>),
            false => candle::<f32>(shape, q.cast(), k.cast(), v.cast(), run_candle::<f32>),
        }
    };
    Box::into_raw(Box::new(call))
}

/// burn-flex's attention.
///
/// # Safety
/// The tensors are of the shape, `[heads, seqlen, head_dim]`, and of its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prepare_burn(shape: Shape, q: *const u8, k: *const u8, v: *const u8) -> *mut Call {
    // SAFETY: as the caller says.
    let call = unsafe {
        match shape.bf16 {
            true => burn::<bf16>(shape, q.cast(), k.cast(), v.cast()),
            false => burn::<f32>(shape, q.cast(), k.cast(), v.cast()),
        }
    };
    Box::into_raw(Box::new(call))
}

/// Whether it computed.
///
/// # Safety
/// The call was prepared and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn run(call: *const Call) -> bool {
    // SAFETY: as the caller says.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unsafe { (*call).0() })).unwrap_or(false)
}

/// # Safety
/// The call was prepared and not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(call: *mut Call) {
    // SAFETY: as the caller says.
    drop(unsafe { Box::from_raw(call) });
}
