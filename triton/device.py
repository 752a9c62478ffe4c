"""Launches a description that `compile.py` wrote on a real GPU, through the driver alone."""

import ctypes
import pathlib
import re
import tomllib

import numpy as np

from formats import TYPES, Tensor, tensor

# CUtensorMapDataType by element type; CUtensorMapSwizzle by name.
MAP_TYPES = {"u8": 0, "i8": 0, "e4m3": 0, "e5m2": 0, "i16": 1, "u32": 2, "i32": 3, "i64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Driver:
    """The context of the first GPU."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        """Calls a function of the driver; anything but success is an error."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} ({(text.value or b'unknown').decode()})")

    def allocate(self, bits):
        """A copy of the array in the GPU's memory."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(bits.nbytes, 16)))
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(bits.ctypes.data), ctypes.c_size_t(bits.nbytes))
        return address

    def read(self, address, bits):
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(bits.ctypes.data), address, ctypes.c_size_t(bits.nbytes))

    def free(self, address):
        self.call("cuMemFree_v2", address)


def buffer(text, folder):
    """The tensor that `buf:TYPE:SHAPE:INIT` describes."""
    _, dtype, shape, init = text.split(":", 3)
    shape = tuple(int(n) for n in shape.split("x"))
    if init.startswith("@"):
        return Tensor(dtype, np.load(folder / init[1:]).astype(TYPES[dtype][1]).reshape(shape))
    return tensor(dtype, np.full(shape, {"nan": np.nan, "zeros": 0, "ones": 1}[init]))


def encode_map(driver, description, address, dtype):
    """A CUtensorMap."""
    rank = len(description["sizes"])
    longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    storage = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.addressof(storage) + 63) // 64 * 64
    driver.call("cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), MAP_TYPES[dtype], rank, address, longs(*description["sizes"]),
                (ctypes.c_uint64 * max(rank - 1, 1))(*description["strides"]), ints(*description["box"]), ints(*[1] * rank), 0,
                SWIZZLES[description["swizzle"]], 2, 0)
    return ctypes.string_at(aligned, 128)


def difference(got, want, absolute, relative):
    """A sentence about the elements that are not close enough, or None."""
    got, want = got.reshape(-1), want.reshape(-1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        wrong = ~((error <= absolute + relative * np.abs(want)) | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    return f"{wrong.sum()} of {wrong.size} differ, first at {at}: got {got[at]:.7g}, want {want[at]:.7g}; worst error {np.nanmax(error):.3g}"


def launch(driver, path):
    """Runs one description once. Returns a sentence about what is wrong with the outputs, or None."""
    path = pathlib.Path(path)
    folder = path.parent
    description = tomllib.loads(path.read_text())
    image = (folder / description["ptx"]).with_suffix(".cubin").read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver.call("cuModuleLoadData", ctypes.byref(module), image)
    driver.call("cuModuleGetFunction", ctypes.byref(function), module, description["entry"].encode())
    driver.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, description["shared"])

    buffers, values = {}, []
    for place, text in enumerate(description["args"]):
        kind, _, rest = text.partition(":")
        if kind == "buf":
            data = buffer(text, folder)
            buffers[place] = (data, driver.allocate(data.bits))
            values.append(buffers[place][1])
        elif kind == "map":
            one = description["map"][rest]
            data = buffer(one["buffer"], folder)
            buffers[place] = (data, driver.allocate(data.bits))
            block = (ctypes.c_uint64 * 24)()
            aligned = (ctypes.addressof(block) + 63) // 64 * 64
            ctypes.memmove(aligned, encode_map(driver, one, buffers[place][1], data.dtype), 128)
            values.append((block, aligned))
        else:
            values.append({"i32": lambda: ctypes.c_int32(int(rest)), "i64": lambda: ctypes.c_int64(int(rest)),
                           "f32": lambda: ctypes.c_float(float(rest)), "null": lambda: ctypes.c_uint64(0)}[kind]())
    pointers = (ctypes.c_void_p * len(values))(*[v[1] if isinstance(v, tuple) else ctypes.addressof(v) for v in values])
    grid, block = (map(ctypes.c_uint, description[k]) for k in ("grid", "block"))
    driver.call("cuLaunchKernel", function, *grid, *block, ctypes.c_uint(description["shared"]), None, pointers, None)
    driver.call("cuCtxSynchronize")

    found = []
    for expect in description.get("expect", []):
        data, address = buffers[expect["arg"]]
        got = Tensor(data.dtype, data.bits.copy())
        driver.read(address, got.bits)
        wrong = difference(got.values, np.load(folder / expect["file"]), expect["abs"], expect["rel"])
        if wrong:
            found.append(f"argument {expect['arg']}: {wrong}")
    for _, address in buffers.values():
        driver.free(address)
    driver.call("cuModuleUnload", module)
    return "; ".join(found) or None


def entries(folder, cc, wanted=""):
    """The descriptions of one architecture whose case matches."""
    return sorted(p for p in pathlib.Path(folder).glob(f"*-{cc}.toml") if re.search(wanted, p.stem))
