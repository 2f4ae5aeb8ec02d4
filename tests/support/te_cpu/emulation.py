"""The kernels of `transformer_engine_torch` that TE's Linear, norms and MLPs call, in plain torch.

Casts and scale updates follow the CUDA sources (an amax kernel drops NaN and keeps inf; the fused
update does not roll a window whose staged amax is 0). Products multiply in fp32 and round once.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

DTYPES = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}
NATIVE_GEMM = [False]
CALLS: dict[str, int] = {}


def _codes(tensor: Any) -> Tensor:
    """The FP8 codes of a Float8Tensor(Storage), not transposed."""
    dtype = DTYPES[int(tensor._fp8_dtype)]
    if tensor._data is not None:
        return tensor._data.view(dtype)
    codes = tensor._transpose.view(dtype)  # (last, rest...) -> (rest..., last)
    return codes.permute(*range(1, codes.dim()), 0).contiguous()


def _is_fp8(tensor: Any) -> bool:
    return hasattr(tensor, "_fp8_dtype")


def _plain(tensor: Any) -> Tensor:
    """fp32 values of a plain or an FP8 tensor."""
    if _is_fp8(tensor):
        return _codes(tensor).float() * tensor._scale_inv
    return tensor.detach().float()


def quantize(
    tensor: Tensor,
    quantizer: Any,
    output: Any = None,
    noop: Any = None,
    nominal: torch.dtype | None = None,
) -> Any:
    """Cast with the quantizer's scale (delayed) or the tensor's own (current); record the amax.

    The result stands for a tensor of dtype `nominal`, the tensor's own if that is None.
    """
    kind = type(quantizer).__name__
    CALLS[kind] = CALLS.get(kind, 0) + 1
    dtype = DTYPES[int(quantizer.dtype)]
    largest = torch.finfo(dtype).max
    x = tensor.detach().float()
    amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=torch.inf).max() if x.numel() else x.sum()
    if kind == "Float8Quantizer":
        staged = quantizer.amax
        staged.copy_(torch.maximum(staged.reshape(()), amax).reshape(staged.shape))
        scale = quantizer.scale.clone()  # a result keeps the scale it was cast with
    elif kind == "Float8CurrentScalingQuantizer":
        scale = _current_scale(amax, largest, quantizer).reshape(1)
    else:
        raise RuntimeError(f"quantize with {kind} is not emulated")
    data = (x * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    scale_inv = (1 / scale).reshape(1)
    if output is not None:
        output._data, output._scale_inv = data, scale_inv
        output._transpose, output._transpose_invalid = None, True
        return output
    result = _wrap(quantizer, data, scale_inv, nominal or tensor.dtype)
    if quantizer.columnwise_usage:
        result._transpose, result._transpose_invalid = fp8_transpose(data, quantizer.dtype), False
        if not quantizer.rowwise_usage:
            result._data = None
    return result


def _current_scale(amax: Tensor, largest: float, quantizer: Any) -> Tensor:
    """csrc/quantizer.cpp, common/recipe/recipe_common.cuh: MAX over the group, then 448 / amax."""
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    amax = amax.clamp(min=quantizer.amax_epsilon)
    # A tensor: torch makes number / tensor a product with 1 / tensor, the kernels divide once.
    scale = (torch.tensor(largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    if quantizer.force_pow_2_scales:
        scale = (scale.reshape(1).view(torch.int32) & 0x7F800000).view(torch.float32).reshape(())
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones(()))


def split_quantize(tensor: Tensor, sections: Any, quantizers: Any, **options: Any) -> list[Any]:
    """Cast each expert's rows with its own quantizer."""
    parts = tensor.split(list(sections))
    return [quantize(part, one) for part, one in zip(parts, quantizers, strict=True)]


def _wrap(quantizer: Any, data: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Any:
    from transformer_engine.pytorch.tensor import Float8Tensor, Float8TensorStorage

    shared: dict[str, Any] = {
        "data": data,
        "fp8_scale_inv": scale_inv,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": None,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, requires_grad=False, **shared)
    return Float8Tensor(
        shape=data.shape, dtype=dtype, requires_grad=False, device=data.device, **shared
    )


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Values of an FP8 tensor."""
    return _plain(tensor).to(DTYPES[int(dtype)])


def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool = False
) -> Any:
    """An FP8 tensor of zeros."""
    data = torch.zeros(tuple(shape), dtype=torch.uint8)
    return _wrap(quantizer, data, torch.ones(1), dtype)


def bgrad_quantize(dy: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The bias gradient of dy and its cast."""
    return dy.reshape(-1, dy.shape[-1]).float().sum(0).to(dy.dtype), quantize(dy, quantizer)


def _product(a: Any, transpose_a: bool, b: Any, transpose_b: bool, dtype: torch.dtype) -> Tensor:
    """BLAS order: out = op(b) @ op(a); fp32, or with `NATIVE_GEMM` as megafp8's products round."""
    if NATIVE_GEMM[0]:
        native = _native_product(a, transpose_a, b, transpose_b, dtype)
        if native is not None:
            return native
    left, right = _plain(a), _plain(b)
    if transpose_b:  # wgrad
        return right.reshape(-1, right.shape[-1]).t() @ left.reshape(-1, left.shape[-1])
    return right @ (left.t() if transpose_a else left)


def _native_product(
    a: Any, transpose_a: bool, b: Any, transpose_b: bool, dtype: torch.dtype
) -> Tensor | None:
    if _is_fp8(a) != _is_fp8(b) or dtype not in (torch.bfloat16, torch.float32):
        return None
    from megafp8.numerics import dgrad, fprop, matmul, wgrad

    flat_b = _rows(b)
    if not _is_fp8(a):
        flat_a = _rows(a)
        if transpose_b:
            return matmul(flat_b.t(), flat_a)
        product = matmul(flat_b, flat_a.t() if transpose_a else flat_a)
        return product.view(*b.shape[:-1], product.shape[-1])
    left, right = _operand(a), _operand(b)
    if transpose_b:
        return wgrad(right, left)
    product = (fprop if transpose_a else dgrad)(right, left)
    return product.view(*_codes(b).shape[:-1], product.shape[-1])


def _rows(tensor: Any) -> Any:
    if _is_fp8(tensor):
        return tensor
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _operand(tensor: Any) -> Any:
    from megafp8.numerics import E4M3, E5M2, QuantizedTensor

    codes = _codes(tensor)
    fmt = E4M3 if codes.dtype == E4M3.dtype else E5M2
    return QuantizedTensor(codes.reshape(-1, codes.shape[-1]), tensor._scale_inv.reshape(()), fmt)


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    split: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """(out, bias gradient, GELU input, extra output), as the extension returns them."""
    if out_dtype is not None:
        dtype = DTYPES[int(out_dtype)]
    else:
        dtype = D.dtype if D is not None else getattr(B, "_dtype", None) or B.dtype
    out = _product(A, transa, B, transb, dtype) * alpha
    has_bias = bias is not None and bias.numel() > 0
    bias_grad = gelu_input = None
    if has_bias and not grad:
        out = out + bias.float()
    if grad and has_bias:
        right = _plain(B)
        bias_grad = right.reshape(-1, right.shape[-1]).sum(0).to(DTYPES[int(bias_type)])
    if gelu and not grad:
        gelu_input = out.to(dtype)
        out = F.gelu(out, approximate="tanh")
    if gelu and grad:
        out = _activation_backward("gelu", out, gelu_in.float())
    if D is not None:
        if accumulate:
            D.add_(out.to(D.dtype))
        else:
            D.copy_(out.to(D.dtype))
        return D, bias_grad, gelu_input, extra_output
    out = out.to(dtype)
    if quantizer is not None:
        out = quantize(out, quantizer)
    return out, bias_grad, gelu_input, extra_output


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """(rest..., last) -> (last, rest...) of codes."""
    columns = data.shape[-1]
    result = data.reshape(-1, columns).t().contiguous().reshape(columns, *data.shape[:-1])
    if out is not None and out.shape == result.shape:
        return out.copy_(result)
    return result


def te_general_grouped_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    D_type: Any,
    m_splits: Any,
    bias: Any,
    bias_type: Any,
    single_output: bool,
    pre_gelu: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    split: bool,
    sm_count: int,
) -> Any:
    """One product per expert."""
    offset = 0
    for index in range(len(A)):
        given = bias[index] if bias[index].numel() else None
        end = offset + m_splits[index]
        target = D[0][offset:end] if single_output else D[index]
        offset = end
        _, bias_grad, _, _ = generic_gemm(
            A[index], transa, B[index], transb, target, None, None, given, bias_type, False, None,
            grad, None, 0, accumulate, split,
        )  # fmt: skip
        if grad and bias_grad is not None:
            bias[index].copy_(bias_grad)
    return bias


def _finish(y: Tensor, dtype: Any, quantizer: Any, out: Any) -> Any:
    """A norm's result; with delayed scaling the kernel casts the fp32 values (normalization.cpp).

    With `NATIVE_GEMM` they are rounded to `dtype` first, as a norm of its own leaves them.
    """
    nominal = DTYPES[int(dtype)]
    if quantizer is not None:
        fused = type(quantizer).__name__ == "Float8Quantizer" and not NATIVE_GEMM[0]
        return quantize(y if fused else y.to(nominal), quantizer, out, nominal=nominal)
    y = y.to(nominal)
    return y if out is None else out.copy_(y)


def layernorm_fwd(
    x: Tensor, w: Tensor, b: Any, eps: float, out: Any, quantizer: Any, dtype: Any, sm: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:  # fmt: skip
    """(y, mean, 1 / std)."""
    values = x.detach().float()
    if NATIVE_GEMM[0] and not zero_centered:
        shape, bias = x.shape[-1:], None if b is None else b.detach().float()
        y, mean, rstd = torch.native_layer_norm(values, shape, w.detach().float(), bias, eps)
        return _finish(y, dtype, quantizer, out), mean.squeeze(-1), rstd.squeeze(-1)
    mean = values.mean(-1)
    rstd = torch.rsqrt(values.var(-1, unbiased=False) + eps)
    gain = w.detach().float() + zero_centered
    y = (values - mean[..., None]) * rstd[..., None] * gain
    if b is not None:
        y = y + b.detach().float()
    return _finish(y, dtype, quantizer, out), mean, rstd


def layernorm_bwd(
    dz: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor, sm: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    values, dz = x.detach().float(), dz.float()
    shape = (*values.shape[:-1], 1)
    if NATIVE_GEMM[0] and not zero_centered:
        gain, moments = w.detach().float(), (mean.reshape(shape), rstd.reshape(shape))
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dz, values, values.shape[-1:], *moments, gain, gain, [True] * 3
        )
        return dx.to(x.dtype), dw.to(w.dtype), db.to(w.dtype)
    normed = (values - mean.reshape(shape)) * rstd.reshape(shape)
    dy = dz * (w.detach().float() + zero_centered)
    dx = (dy - dy.mean(-1, True) - normed * (dy * normed).mean(-1, True)) * rstd.reshape(shape)
    return dx.to(x.dtype), _column_sum(dz * normed, w), _column_sum(dz, w)


def _column_sum(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0).to(like.dtype)


def rmsnorm_fwd(
    x: Tensor, w: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, sm: int,
    zero_centered: bool,
) -> tuple[Any, None, Tensor]:  # fmt: skip
    """(y, None, 1 / rms)."""
    values = x.detach().float()
    rstd = torch.rsqrt(values.pow(2).mean(-1) + eps)
    y = values * rstd[..., None] * (w.detach().float() + zero_centered)
    return _finish(y, dtype, quantizer, out), None, rstd


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rstd: Tensor, w: Tensor, sm: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    values, dz = x.detach().float(), dz.float()
    rstd = rstd.reshape(*values.shape[:-1], 1)
    normed = values * rstd
    dy = dz * (w.detach().float() + zero_centered)
    dx = (dy - normed * (dy * normed).mean(-1, True)) * rstd
    return dx.to(x.dtype), _column_sum(dz * normed, w)


def _gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate) * up

    return gated


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _tanh_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "srelu": _squared_relu,
    "qgelu": _quick_gelu,
    "geglu": _gated(_tanh_gelu),
    "reglu": _gated(F.relu),
    "swiglu": _gated(F.silu),
    "sreglu": _gated(_squared_relu),
    "qgeglu": _gated(_quick_gelu),
    "glu": _gated(torch.sigmoid),
}


def _activation_backward(name: str, grad: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().float().requires_grad_()
        return torch.autograd.grad(ACTIVATIONS[name](x), x, grad.float())[0]


def _activation_kernels(name: str) -> dict[str, Callable[..., Any]]:
    def forward(x: Tensor, quantizer: Any = None, *args: Any, **kwargs: Any) -> Any:
        y = ACTIVATIONS[name](x.detach().float()).to(x.dtype)
        return y if quantizer is None else quantize(y, quantizer)

    def backward(grad: Tensor, x: Tensor, quantizer: Any = None, *args: Any, **kw: Any) -> Any:
        dx = _activation_backward(name, grad, x).to(x.dtype)
        return dx if quantizer is None else quantize(dx, quantizer)

    def backward_with_bias(grad: Tensor, x: Tensor, quantizer: Any = None) -> Any:
        dx = _activation_backward(name, grad, x).to(x.dtype)
        return _column_sum(dx.float(), dx), dx if quantizer is None else quantize(dx, quantizer)

    return {name: forward, f"d{name}": backward, f"dbias_d{name}": backward_with_bias}


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor, histories: Any, scales: Any, algorithm: str, dtype: Any, margin: int
) -> None:
    """TE's own update (fused form): no roll where the staged amax is 0."""
    largest, offset = torch.finfo(DTYPES[int(dtype)]).max, 0
    for history, scale in zip(histories, scales, strict=True):
        count = history.shape[1]
        staged = amaxes[offset : offset + count]
        offset += count
        history[0].copy_(torch.where(staged != 0, staged, history[0]))
        amax = history.max(0).values if algorithm == "max" else history[0].clone()
        used = history[0] != 0
        if history.shape[0] > 1:
            history.copy_(torch.where(used, torch.roll(history, -1, 0), history))
        history[0].fill_(0)
        quotient = torch.tensor(largest) / amax  # as the kernel, one division
        new = (quotient / 2**margin).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where((amax > 0) & torch.isfinite(amax), new, scale))


def install(extension: ModuleType) -> None:
    """Give the stand-in its kernels."""
    kernels: list[Callable[..., Any]] = [
        quantize,
        split_quantize,
        dequantize,
        create_empty_quantized_tensor,
        bgrad_quantize,
        generic_gemm,
        fp8_transpose,
        te_general_grouped_gemm,
        layernorm_fwd,
        layernorm_bwd,
        rmsnorm_fwd,
        rmsnorm_bwd,
        fused_amax_and_scale_update_after_reduction,
    ]
    for kernel in kernels:
        setattr(extension, kernel.__name__, kernel)
    extension.get_num_cublas_streams = lambda: 4  # type: ignore[attr-defined]
    for name in ACTIVATIONS:
        for kernel_name, kernel in _activation_kernels(name).items():
            setattr(extension, kernel_name, kernel)
