# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels with NVRTC, makes tensor maps and launches through the driver: ctypes alone."""
import ctypes as C
import glob, os, pickle, struct, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = ("ptx.cuh", "wgmma.cuh", "backward.cuh", "bias_gradient.cuh", "backward_small.cuh")


def _find_nvrtc():
    if os.environ.get("NVRTC"):  # which library, for comparisons
        return C.CDLL(os.environ["NVRTC"])
    for line in open("/proc/self/maps"):
        if "libnvrtc.so" in line:
            return C.CDLL(line.split()[-1])
    import site
    found = [p for d in site.getsitepackages() for p in glob.glob(d + "/nvidia/**/libnvrtc.so*", recursive=True)] + glob.glob("/usr/local/cuda*/**/libnvrtc.so.13", recursive=True)
    return C.CDLL(found[0])


_library = None


def _nvrtc():
    """One library for the whole process: cuDNN loads another one later, whose code differs."""
    global _library
    if _library is None:
        _library = _find_nvrtc()
        a, b = C.c_int(), C.c_int()
        _library.nvrtcVersion(C.byref(a), C.byref(b))
        print(f"NVRTC {a.value}.{b.value} {_library._name}", file=sys.stderr)
    return _library


def text():
    return "".join(l for f in FILES for l in open(os.path.join(HERE, f)) if not l.startswith("#pragma once"))


def compile(names):
    """-> (cubin, {name: lowered name}, seconds)"""
    n = _nvrtc()
    prog, start = C.c_void_p(), time.time()
    assert n.nvrtcCreateProgram(C.byref(prog), text().encode(), b"backward.cu", 0, None, None) == 0
    for name in names:
        assert n.nvrtcAddNameExpression(prog, name.encode()) == 0
    opts = [b"-std=c++20", b"-arch=sm_90a", b"-default-device"]
    rc = n.nvrtcCompileProgram(prog, len(opts), (C.c_char_p * len(opts))(*opts))
    size = C.c_size_t()
    n.nvrtcGetProgramLogSize(prog, C.byref(size))
    log = C.create_string_buffer(size.value)
    n.nvrtcGetProgramLog(prog, log)
    text_log = log.value.decode()
    assert rc == 0, text_log
    for line in text_log.splitlines():
        if "C75" in line:
            print(line[:160], file=sys.stderr)
    lowered = {}
    for name in names:
        out = C.c_char_p()
        assert n.nvrtcGetLoweredName(prog, name.encode(), C.byref(out)) == 0
        lowered[name] = out.value
    n.nvrtcGetCUBINSize(prog, C.byref(size))
    cubin = C.create_string_buffer(size.value)
    n.nvrtcGetCUBIN(prog, cubin)
    n.nvrtcDestroyProgram(C.byref(prog))
    return cubin.raw, lowered, time.time() - start


class Compiler:
    """A process of its own. Note: in a process that has used cuDNN, the same NVRTC spills and serialises kernels that it compiles well
    before (0 -> 208 bytes local, 0.42 -> 0.67 s, 462 -> 781 us for one of them)."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, name):
        self.process.stdin.write(name.encode() + b"\n")
        self.process.stdin.flush()
        size, = struct.unpack("q", self.process.stdout.read(8))
        return pickle.loads(self.process.stdout.read(size))


class TensorMap(C.Structure):
    _fields_ = [("opaque", C.c_ubyte * 128)]


def _struct(name, spec):
    return type(name, (C.Structure,), {"_fields_": [(f, t) for t, fs in spec for f in fs.split()]})


Params = _struct("Params", [(C.c_void_p, "o dout lse lse_rows delta_rows dq_acc dq dk dv"),
                            (C.c_longlong, "o_b o_s o_h do_b do_s do_h dq_b dq_s dq_h dk_b dk_s dk_h"),
                            (C.c_int, "B H S padded passes items b2 bias_b1 bias_b2 bias_h"), (C.c_float, "scale")])
BiasParams = _struct("BiasParams", [(C.c_void_p, "lse_rows delta_rows out partial flags"), (C.c_int, "B H S padded list chunks items"), (C.c_float, "scale"), (C.c_int, "lse_is_log2")])

SmallParams = _struct("SmallParams", [(C.c_void_p, "lse bias partial dbias dq dk dv"), (C.c_longlong, "b s h"), (C.c_int, "B H S list"), (C.c_float, "scale")])


class Attribute(C.Structure):
    _fields_ = [("id", C.c_int), ("pad", C.c_int), ("value", C.c_int), ("rest", C.c_int * 15)]


Config = _struct("Config", [(C.c_uint, "gx gy gz bx by bz shared pad"), (C.c_void_p, "stream attributes"), (C.c_uint, "count")])


class Gpu:
    def __init__(self):
        self.cu, self.functions, self.times, self.compile = C.CDLL("libcuda.so.1"), {}, {}, Compiler()

    def check(self, rc, what):
        if rc:
            s = C.c_char_p()
            self.cu.cuGetErrorName(rc, C.byref(s))
            raise RuntimeError(f"{what}: {s.value}")

    def function(self, name, smem=0):
        if name not in self.functions:
            cubin, lowered, seconds = self.compile(name)
            module, f = C.c_void_p(), C.c_void_p()
            self.check(self.cu.cuModuleLoadData(C.byref(module), cubin), "load")
            self.check(self.cu.cuModuleGetFunction(C.byref(f), module, lowered[name]), "function")
            if smem > 48000:
                self.check(self.cu.cuFuncSetAttribute(f, 8, smem), f"shared memory {smem} of {name}")
            v = C.c_int()
            self.cu.cuFuncGetAttribute(C.byref(v), 3, f)
            self.functions[name] = f
            self.times[name] = (seconds, v.value)
        return self.functions[name]

    def tensor_map(self, t, dims, strides, box, swizzle):
        """dims, box from the innermost; strides in bytes without the innermost; swizzle 64 or 128"""
        m, n = TensorMap(), len(dims)
        buf = C.create_string_buffer(256)
        at = (C.addressof(buf) + 63) // 64 * 64
        self.check(self.cu.cuTensorMapEncodeTiled(C.c_void_p(at), 9, n, C.c_void_p(t.data_ptr()), (C.c_ulonglong * n)(*dims), (C.c_ulonglong * (n - 1))(*strides),
                                                  (C.c_uint * n)(*box), (C.c_uint * n)(*[1] * n), 0, {64: 2, 128: 3}[swizzle], 3, 0), "tensor map")
        C.memmove(C.addressof(m), at, 128)
        return m

    def launch(self, f, grid, block, smem, args, stream, dependent=False):
        """dependent: may start before the previous kernel of the stream has ended (it waits itself)"""
        ptrs = (C.c_void_p * len(args))(*[C.addressof(a) for a in args])
        attribute = Attribute(6, 0, 1)
        gx, gy = grid if isinstance(grid, tuple) else (grid, 1)
        config = Config(gx, gy, 1, block, 1, 1, smem, 0, stream, C.addressof(attribute), 1 if dependent else 0)
        self.check(self.cu.cuLaunchKernelEx(C.byref(config), f, ptrs, None), "launch")


if __name__ == "__main__":
    for line in sys.stdin:
        answer = pickle.dumps(compile([line.strip()]))
        sys.stdout.buffer.write(struct.pack("q", len(answer)) + answer)
        sys.stdout.buffer.flush()
