"""Arrays of NumPy, and stand-ins for CuPy's and JAX's; torch is not needed."""

import subprocess
import sys
import types

import flashstrata
import numpy as np
import pytest
from flashstrata import arrays
from test_host import attention as expected


def tensors(dtype, *shapes):
    rng = np.random.default_rng(11)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-5), (np.float16, 2e-3)])
@pytest.mark.parametrize("causal", [False, True])
def test_numpy(dtype, bound, causal):
    q, k, v = tensors(dtype, (2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    out, lse = flashstrata.attention(q, k, v, causal=causal, return_lse=True)
    wanted, wanted_lse = expected(q, k, v, causal)
    assert type(out) is np.ndarray and out.dtype == dtype and lse.dtype == np.float32
    assert np.abs(out - wanted).max() < bound and np.abs(lse - wanted_lse).max() < 1e-3


def test_numpy_with_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = tensors(ml_dtypes.bfloat16, (1, 33, 2, 32), (1, 40, 2, 32), (1, 40, 2, 32))
    out = flashstrata.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    assert np.abs(out.astype(np.float64) - expected(q, k, v, False)[0]).max() < 2e-2


def test_strides_are_free():
    (qkv,) = tensors(np.float32, (1, 50, 3, 4, 32))
    q, k, v = (qkv[:, :, index] for index in range(3))
    out = flashstrata.attention(q, k, v, window_size=(8, 0))
    assert np.array_equal(out, flashstrata.attention(*map(np.ascontiguousarray, (q, k, v)), window_size=(8, 0)))
    columns_apart = np.ascontiguousarray(k.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    assert np.array_equal(out, flashstrata.attention(q, columns_apart, v, window_size=(8, 0)))
    backwards = np.ascontiguousarray(k[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    assert np.array_equal(out, flashstrata.attention(q, backwards, v, window_size=(8, 0)))


class Other:
    """An array of a library that nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **named):
        return self.array.__dlpack__(**named)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_what_has_dlpack_is_computed():
    q, k, v = tensors(np.float32, (1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    assert np.array_equal(flashstrata.attention(Other(q), Other(k), Other(v)), flashstrata.attention(q, k, v))


def test_refusals_name_the_argument():
    q, k, v = tensors(np.float32, (1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    with pytest.raises(ValueError, match="k is float16"):
        flashstrata.attention(q, k.astype(np.float16), v)
    with pytest.raises(ValueError, match="q is float64"):
        flashstrata.attention(*(x.astype(np.float64) for x in (q, k, v)))
    with pytest.raises(ValueError, match="v has shape"):
        flashstrata.attention(q, k, v[0])
    with pytest.raises(TypeError, match="list"):
        flashstrata.attention(q.tolist(), k, v)


def test_what_numpy_would_misread_is_refused():
    q, k, v = tensors(np.float32, (1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16))
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    for arguments, name in ((swapped, "q"), ((q, swapped[1], v), "k"), ((q, k, swapped[2]), "v")):
        with pytest.raises(ValueError, match=f"{name} is float32 .*native byte order"):
            flashstrata.attention(*arguments)
    with pytest.raises(ValueError, match="q is .*Other.*native byte order"):
        flashstrata.attention(*map(Other, swapped))
    with pytest.raises(ValueError, match="k is a masked array"):
        flashstrata.attention(q, np.ma.masked_less(k, 0), v)


def test_bfloat16_that_numpy_cannot_read_is_refused():
    torch = pytest.importorskip("torch")
    zeros = Other(torch.zeros(1, 9, 2, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="q is .*Other.*must be float16 or float32"):
        flashstrata.attention(zeros, zeros, zeros)


class Recorder:
    """A device that notes its calls."""

    def __init__(self):
        self.calls = []

    def forward(self, *arguments):
        self.calls.append(arguments)

    def synchronize(self, stream):
        self.calls.append(("synchronize", stream))


def on_a_gpu(module):
    """A class of arrays that say they are on GPU 3, in memory of the host."""

    class Array:
        __module__ = module

        def __init__(self, array):
            self.array, self.dtype, self.shape, self.ndim, self.size = array, array.dtype, array.shape, array.ndim, array.size
            self.device = "the device"

        def __dlpack__(self, **_):
            raise AssertionError("nothing is copied")

        def __dlpack_device__(self):
            return 2, 3

        @property
        def __cuda_array_interface__(self):
            of = self.array.__array_interface__
            contiguous = self.array.flags.c_contiguous
            return {"shape": of["shape"], "data": of["data"], "strides": None if contiguous else self.array.strides}

    return Array


def test_cupy_goes_to_its_current_stream(monkeypatch):
    array, recorder, current = on_a_gpu("cupy"), Recorder(), []

    class On:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            current.append(self.ordinal)

        def __exit__(self, *_):
            current.pop()

    def empty(shape, dtype):
        assert current == [3]
        return array(np.empty(shape, dtype))

    cuda = types.SimpleNamespace(Device=On, get_current_stream=lambda: types.SimpleNamespace(ptr=77))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, empty=empty, float32=np.float32))
    monkeypatch.setattr(arrays, "gpu", lambda ordinal: {3: recorder}[ordinal])
    (kv,) = tensors(np.float16, (1, 20, 2, 2, 16))
    (q,) = tensors(np.float16, (1, 10, 4, 16))
    out, lse = flashstrata.attention(array(q), array(kv[:, :, 0]), array(kv[:, :, 1]), causal=True, return_lse=True)
    ((stream, dtype, of_q, of_k, _, of_out, of_lse, scale, left, right, softcap),) = recorder.calls
    assert (stream, dtype, scale, left, right, softcap) == (77, "f16", None, -1, 0, 0.0)
    assert of_q == (q.ctypes.data, (1, 10, 4, 16), (640, 64, 16, 1))
    assert of_k == (kv.ctypes.data, (1, 20, 2, 16), (1280, 64, 16, 1))
    assert of_out[0] == out.array.ctypes.data and of_lse == (lse.array.ctypes.data, 160)
    assert out.shape == (1, 10, 4, 16) and lse.shape == (1, 4, 10)


def test_jax_is_waited_for(monkeypatch):
    array, recorder, waited = on_a_gpu("jaxlib"), Recorder(), []

    def wait(what):
        waited.append(what)
        return what

    numpy = types.SimpleNamespace(float32=np.float32, zeros=lambda shape, dtype: array(np.zeros(shape, dtype)))
    jax = types.SimpleNamespace(numpy=numpy, block_until_ready=wait, device_put=lambda what, _: what)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(arrays, "gpu", lambda _: recorder)
    q, k, v = map(array, tensors(np.float32, (1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16)))
    out = flashstrata.attention(q, k, v)
    assert out.shape == (1, 9, 2, 16) and waited[0] == (q, k, v)
    assert recorder.calls[0][0] == 0 and recorder.calls[1] == ("synchronize", 0)


def test_torch_is_not_imported():
    code = "import sys, flashstrata, flashstrata.lab, numpy as np; x = np.ones((1, 2, 1, 8), np.float32); "
    code += "assert (flashstrata.attention(x, x, x) == 1).all() and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_jax_on_the_cpu():
    jax = pytest.importorskip("jax")
    q, k, v = tensors(np.float32, (1, 33, 2, 32), (1, 40, 2, 32), (1, 40, 2, 32))
    place = jax.devices("cpu")[0]
    for dtype, bound in ((jax.numpy.float32, 1e-5), (jax.numpy.bfloat16, 2e-2)):
        rounded = [jax.device_put(x, place).astype(dtype) for x in (q, k, v)]
        out = flashstrata.attention(*rounded, causal=True)
        assert isinstance(out, jax.Array) and out.dtype == dtype
        wanted = expected(*(np.asarray(x, np.float64) for x in rounded), True)[0]
        assert np.abs(np.asarray(out, np.float64) - wanted).max() < bound
