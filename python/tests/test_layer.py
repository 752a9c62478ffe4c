"""A layer as Hugging Face's models have it, written against flash_attn's functions: it runs unchanged."""

import pytest

torch = pytest.importorskip("torch")

from flashstrata import flash_attn_func, flash_attn_varlen_func  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def rotate_half(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def unpad(x, mask):
    """Tokens that a mask keeps, their indices, where each sequence begins, and the longest."""
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[indices], indices, cu_seqlens, lengths.max().item()


def pad(x, indices, batch, seqlen):
    padded = x.new_zeros(batch * seqlen, *x.shape[1:])
    padded[indices] = x
    return padded.unflatten(0, (batch, seqlen))


class Attention(torch.nn.Module):
    """Grouped queries, rotary embedding, a causal mask; of padded batches the padding is taken out."""

    def __init__(self, hidden=128, heads=8, heads_kv=2, window=None):
        super().__init__()
        self.heads, self.heads_kv, self.dim, self.window = heads, heads_kv, hidden // heads, window
        self.q_proj = torch.nn.Linear(hidden, heads * self.dim, bias=False)
        self.k_proj = torch.nn.Linear(hidden, heads_kv * self.dim, bias=False)
        self.v_proj = torch.nn.Linear(hidden, heads_kv * self.dim, bias=False)
        self.o_proj = torch.nn.Linear(heads * self.dim, hidden, bias=False)

    def project(self, hidden_states):
        batch, seqlen, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, seqlen, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(batch, seqlen, self.heads_kv, self.dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(batch, seqlen, self.heads_kv, self.dim).transpose(1, 2)
        frequencies = 10000.0 ** (-torch.arange(0, self.dim, 2, device=q.device).float() / self.dim)
        angles = torch.outer(torch.arange(seqlen, device=q.device).float(), frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v

    def forward(self, hidden_states, attention_mask=None):
        batch, seqlen, _ = hidden_states.shape
        # flash_attn's order of dimensions is a view.
        q, k, v = (x.transpose(1, 2) for x in self.project(hidden_states))
        options = {"softmax_scale": self.dim**-0.5, "causal": True}
        if self.window is not None:
            options["window_size"] = (self.window, self.window)
        if attention_mask is None:
            out = flash_attn_func(q, k, v, 0.0, **options)
        else:
            q, indices, cu_seqlens, longest = unpad(q, attention_mask)
            k, v = unpad(k, attention_mask)[0], unpad(v, attention_mask)[0]
            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
                dropout_p=0.0, **options,
            )  # fmt: skip
            out = pad(out, indices, batch, seqlen)
        return self.o_proj(out.reshape(batch, seqlen, -1).contiguous())

    def eager(self, hidden_states, attention_mask=None):
        """The same with every score in memory."""
        q, k, v = self.project(hidden_states)
        group = self.heads // self.heads_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        position = torch.arange(scores.shape[-1], device=q.device)
        hidden = position[None] > position[:, None]
        if self.window is not None:
            hidden = hidden | (position[None] < position[:, None] - self.window)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None].bool()
        p = scores.masked_fill(hidden, float("-inf")).float().softmax(-1).nan_to_num().to(q.dtype)
        return self.o_proj((p @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("padded", [False, True])
def test_layer(device, dtype, window, padded):
    torch.manual_seed(5)
    layer = Attention(window=window).to(device, dtype)
    hidden_states = torch.randn(3, 77, 128, device=device, dtype=dtype)
    mask = None
    if padded:
        # Padded on either side.
        mask = torch.ones(3, 77, dtype=torch.int64, device=device)
        mask[0, 50:], mask[1, :20] = 0, 0
    with torch.no_grad():
        out, expected = layer(hidden_states, mask), layer.eager(hidden_states, mask)
    kept = slice(None) if mask is None else mask.bool()
    assert (out[kept].float() - expected[kept].float()).abs().max() < {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_layer_compiled(device):
    torch.manual_seed(5)
    layer = Attention().to(device, torch.bfloat16)
    hidden_states = torch.randn(2, 40, 128, device=device, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device == "cuda" else "eager")
    with torch.no_grad():
        assert (compiled(hidden_states) - layer(hidden_states)).abs().max() < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_layer_in_training_says_what_is_missing(device):
    layer = Attention().to(device)
    with pytest.raises(NotImplementedError, match="requires grad"):
        layer(torch.randn(1, 9, 128, device=device))
