"""Log-probs and entropy from hidden states against those of the full matrix of logits."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_rlhf.functional import entropy as exact_entropy
from lit_rlhf.functional import hidden_log_probs, token_log_probs
from lit_rlhf.functional.logit_tiles import tile_shape

ENTROPIES = ("none", "detached", "train")
# One tile, several of tokens, several of tokens and vocabulary.
TILE_BYTES = (None, 4096, 1000, 128)
KEPT_BYTES = (0, 3000, 10**9)


def full(hidden, weight, token_ids, bias=None, temperature=1.0, scale=1.0, softcap=None, entropy="none"):
    """The plain way: all logits, then log-softmax."""
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    entropies = None if entropy == "none" else exact_entropy(logits, temperature)
    return token_log_probs(logits, token_ids, temperature), entropies


def inputs(tokens=13, size=6, vocabulary=37, dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(tokens + vocabulary)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    token_ids = torch.randint(vocabulary, (tokens,), generator=generator)
    return normal(tokens, size), normal(vocabulary, size), token_ids, normal(vocabulary) if bias else None


def gradients(function, hidden, weight, token_ids, bias, entropy, **options):
    """Outputs and gradients of a sum in which every token has its own weight."""
    log_probs, entropies = function(hidden, weight, token_ids, bias, entropy=entropy, **options)
    factors = torch.linspace(-1.0, 2.0, max(1, log_probs.numel()), dtype=torch.float64)[: log_probs.numel()]
    loss = (log_probs * factors.view_as(log_probs)).sum()
    if entropy == "train":
        loss = loss + (entropies * factors.flip(0).view_as(entropies)).sum()
    leaves = [tensor for tensor in (hidden, weight, bias) if tensor is not None and tensor.requires_grad]
    return [log_probs, *([] if entropies is None else [entropies])], torch.autograd.grad(loss, leaves)


def assert_equals_full(*tensors, atol=1e-11, entropy="none", tiles=None, **options):
    values, grads = gradients(hidden_log_probs, *tensors, entropy, **options, **(tiles or {}))
    expected_values, expected_grads = gradients(full, *tensors, entropy, **options)
    for one, two in itertools.zip_longest([*values, *grads], [*expected_values, *expected_grads]):
        torch.testing.assert_close(one, two, rtol=atol, atol=atol)


@pytest.mark.parametrize("kept_bytes", KEPT_BYTES)
@pytest.mark.parametrize("tile_bytes", TILE_BYTES)
@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"scale": 0.25, "temperature": 2.0}, {"softcap": 1.5, "scale": 2.0, "temperature": 0.6}],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient_equal_those_of_the_full_logits(entropy, tile_bytes, kept_bytes, options, bias):
    tiles = {"tile_bytes": tile_bytes, "kept_bytes": kept_bytes}
    assert_equals_full(*inputs(bias=bias), entropy=entropy, tiles=tiles, **options)


@pytest.mark.parametrize("vocabulary", [1, 2, 37, 300])
@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
@pytest.mark.parametrize("tile_bytes", [None, 256])
def test_every_shape(tokens, vocabulary, tile_bytes):
    tensors = inputs(tokens, 5, vocabulary, bias=True)
    assert_equals_full(*tensors, entropy="train", tiles={"tile_bytes": tile_bytes, "kept_bytes": 500})


@pytest.mark.parametrize("tile_bytes", [None, 64, 8])
def test_gradcheck(tile_bytes):
    hidden, weight, token_ids, bias = inputs(4, 3, 7, bias=True)

    def outputs(hidden, weight, bias):
        return hidden_log_probs(
            hidden, weight, token_ids, bias, softcap=2.0, temperature=0.8, entropy="train", tile_bytes=tile_bytes
        )

    assert torch.autograd.gradcheck(outputs, (hidden, weight, bias))


def test_leading_dimensions_are_kept_and_views_are_allowed():
    hidden, weight, token_ids, _ = inputs(12)
    rows = hidden.view(3, 4, 6).transpose(0, 1)[:, 1:]
    ids = token_ids.view(3, 4).t()[:, 1:]
    log_probs, entropies = hidden_log_probs(rows, weight, ids, entropy="detached", tile_bytes=256)
    expected, expected_entropies = full(rows, weight, ids, entropy="detached")
    assert log_probs.shape == entropies.shape == (4, 2)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-12)
    assert torch.autograd.grad(log_probs.sum(), hidden)[0].shape == hidden.shape


def test_no_token_at_all_still_reaches_every_input():
    hidden, weight, token_ids, bias = inputs(0, bias=True)
    log_probs, entropies = hidden_log_probs(hidden, weight, token_ids, bias, entropy="train")
    assert log_probs.shape == entropies.shape == (0,)
    (log_probs.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, 6)
    assert weight.grad.tolist() == torch.zeros(37, 6).tolist()
    assert bias.grad.tolist() == torch.zeros(37).tolist()


@pytest.mark.parametrize("tile_bytes", [None, 20_000, 4096, 64])
def test_float32_does_not_depend_on_the_tiles(tile_bytes):
    tensors = inputs(20, 16, 500, torch.float32)
    with torch.no_grad():
        tensors[1].mul_(0.25)
    (one, one_entropy), one_grads = gradients(hidden_log_probs, *tensors, "train", tile_bytes=10**9)
    (two, two_entropy), two_grads = gradients(hidden_log_probs, *tensors, "train", tile_bytes=tile_bytes)
    torch.testing.assert_close(one, two, rtol=0, atol=3e-6)
    torch.testing.assert_close(one_entropy, two_entropy, rtol=0, atol=3e-6)
    for left, right in zip(one_grads, two_grads, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=3e-6 * float(left.abs().max()))


@pytest.mark.parametrize("frozen", [(1,), (1, 3), (0,), (0, 3), (0, 1)], ids=str)
@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("kept_bytes", [0, 10**9])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_only_what_is_trained_gets_a_gradient(frozen, entropy, kept_bytes, softcap):
    tensors = inputs(bias=True)
    for index in frozen:
        tensors[index].requires_grad_(False)
    tiles = {"kept_bytes": kept_bytes, "tile_bytes": 400}
    assert_equals_full(*tensors, entropy=entropy, softcap=softcap, tiles=tiles)
    loss = hidden_log_probs(*tensors)[0].sum()
    loss.backward()
    assert [tensors[index].grad is None for index in (0, 1, 3)] == [index in frozen for index in (0, 1, 3)]


def test_detached_entropy_has_no_graph_and_trained_entropy_has():
    hidden, weight, token_ids, _ = inputs()
    log_probs, entropies = hidden_log_probs(hidden, weight, token_ids, entropy="detached")
    assert log_probs.requires_grad
    assert not entropies.requires_grad
    _, entropies = hidden_log_probs(hidden, weight, token_ids, entropy="train")
    # Without a log-prob in the loss.
    grads = torch.autograd.grad(entropies.sum(), (hidden, weight))
    expected = torch.autograd.grad(full(hidden, weight, token_ids, entropy="train")[1].sum(), (hidden, weight))
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-11)


def test_under_no_grad_the_values_are_the_same():
    tensors = inputs()
    with torch.no_grad():
        log_probs, entropies = hidden_log_probs(*tensors, entropy="train", tile_bytes=300)
    assert not log_probs.requires_grad
    expected = hidden_log_probs(*tensors, entropy="train", tile_bytes=300)
    torch.testing.assert_close((log_probs, entropies), tuple(t.detach() for t in expected), rtol=0, atol=0)


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_a_second_backward_pass_gives_the_same(entropy):
    hidden, weight, token_ids, _ = inputs()
    log_probs, entropies = hidden_log_probs(hidden, weight, token_ids, entropy=entropy, tile_bytes=1000)
    loss = (log_probs + entropies if entropy == "train" else log_probs).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-13)


@pytest.mark.parametrize("tile_bytes", TILE_BYTES)
@pytest.mark.parametrize("entropy", ENTROPIES)
def test_impossible_tokens(tile_bytes, entropy):
    hidden, weight, token_ids, bias = inputs(bias=True)
    # Whole tiles of the vocabulary are impossible: the padding of a vocabulary, say.
    with torch.no_grad():
        bias[10:30] = -torch.inf
    token_ids[(token_ids >= 10) & (token_ids < 30)] = 3
    assert_equals_full(hidden, weight, token_ids, bias, entropy=entropy, tiles={"tile_bytes": tile_bytes})
    token_ids[0] = 12
    assert hidden_log_probs(hidden, weight, token_ids, bias, tile_bytes=tile_bytes)[0][0].item() == -torch.inf


def test_large_logits_stay_finite():
    hidden, weight, token_ids, _ = inputs(dtype=torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)
    for tile_bytes in (None, 64):
        tensors = (hidden, weight, token_ids, None)
        assert_equals_full(*tensors, entropy="train", atol=2e-3, tiles={"tile_bytes": tile_bytes})


def assert_values_close(values, expected):
    """Log-probs and entropies of logits around 30, of which the full path's entropy is a difference."""
    for one, two, atol in zip(values, expected, (1e-5, 1e-4), strict=False):
        torch.testing.assert_close(one, two, rtol=0, atol=atol)


@pytest.mark.parametrize("tile_bytes", [None, 2000])
@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_the_plain_path_rounds(tile_bytes, entropy, bias, dtype):
    tensors = inputs(30, 32, 200, dtype, bias=bias)
    options = {"temperature": 0.7, "tile_bytes": tile_bytes}
    values, grads = gradients(hidden_log_probs, *tensors, entropy, **options)
    expected, expected_grads = gradients(full, *tensors, entropy, temperature=0.7)
    assert all(value.dtype == torch.float32 for value in values)
    assert_values_close(values, expected)
    assert all(grad.dtype == dtype for grad in grads)
    wide = [None if t is None else t.detach().double().requires_grad_(t.is_floating_point()) for t in tensors[:2]]
    wide_bias = tensors[3].detach().double().requires_grad_() if bias else None
    _, exact = gradients(full, *wide, tensors[2], wide_bias, entropy, temperature=0.7)
    for one, two, right in zip(grads, expected_grads, exact, strict=True):
        # As good as the plain path's, give or take the last rounding.
        assert (one - right).norm() < 1.3 * (two - right).norm() + 1e-3 * right.norm()
        assert (one - right).norm() < 0.02 * right.norm()


def test_the_weights_gradient_is_summed_in_float32():
    # A half, then steps of 2^-10: a sum in bfloat16 (8 bits) would round each of them away.
    tokens = 500
    hidden = torch.full((tokens, 1), 2.0**-9, dtype=torch.bfloat16)
    hidden[0] = 1.0
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = hidden_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.long), tile_bytes=8)
    log_probs.sum().backward()
    exact = 0.5 * (1 + (tokens - 1) * 2.0**-9)
    assert weight.grad[0, 0].item() == pytest.approx(exact, rel=2.0**-8)


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_autocast_behaves_as_a_linear_layer_under_autocast(entropy):
    tensors = inputs(30, 32, 200, torch.float32, bias=True)

    def under_autocast(function, **options):
        def run(*args, **kwargs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*args, **kwargs, **options)

        return gradients(run, *tensors, entropy)

    values, grads = under_autocast(hidden_log_probs, tile_bytes=2000)
    expected, expected_grads = under_autocast(full)
    assert_values_close(values, expected)
    assert (values[0] - full(*tensors)[0]).abs().max() > 1e-3  # it did round
    for one, two in zip(grads, expected_grads, strict=True):
        assert one.dtype == two.dtype == torch.float32
        torch.testing.assert_close(one, two, rtol=0, atol=0.02 * float(two.abs().max()))


def test_an_autocast_around_the_backward_pass_changes_nothing():
    hidden, weight, token_ids, _ = inputs(dtype=torch.float32)
    grads = []
    for enabled in (False, True):
        log_probs, _ = hidden_log_probs(hidden, weight, token_ids, kept_bytes=0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            grads.append(torch.autograd.grad(log_probs.sum(), (hidden, weight)))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


class Sizes(TorchDispatchMode):
    """The bytes of every storage that an operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.bytes[storage.data_ptr()] = storage.nbytes()
        return outputs


@pytest.mark.parametrize("entropy", ENTROPIES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_larger_than_a_tile_is_made(entropy, softcap, frozen):
    tokens, vocabulary = 300, 2000
    tensors = inputs(tokens, 4, vocabulary, torch.float32, bias=True)
    if frozen:
        tensors[1].requires_grad_(False)
        tensors[3].requires_grad_(False)
    tile_bytes = 64_000
    inner = max(tensor.numel() * 4 for tensor in tensors)
    assert inner <= tile_bytes < tokens * vocabulary * 4 / 30
    with Sizes() as sizes:
        options = {"tile_bytes": tile_bytes, "kept_bytes": 0, "softcap": softcap}
        gradients(hidden_log_probs, *tensors, entropy, **options)
    assert 0.9 * tile_bytes < max(sizes.bytes.values()) <= tile_bytes
    with Sizes() as sizes:
        gradients(full, *tensors, entropy, softcap=softcap)
    assert max(sizes.bytes.values()) == tokens * vocabulary * 4


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.mm)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kept", "recomputed"), [(0, 12), (4, 8), (5, 7), (12, 0)])
def test_tiles_within_the_budget_are_not_recomputed(kept, recomputed):
    tensors = inputs(40, 6, 30, torch.float32)
    tile_bytes = 400  # 10 x 10 numbers: 4 x 3 tiles
    with Products() as products:
        gradients(hidden_log_probs, *tensors, "detached", tile_bytes=tile_bytes, kept_bytes=kept * tile_bytes)
    assert products.count == 12 + recomputed + 2 * 12


def test_a_tile_is_square_unless_an_edge_is_shorter():
    assert tile_shape(5000, 100_000, 10_000) == (100, 100)
    assert tile_shape(5000, 20, 10_000) == (500, 20)
    assert tile_shape(4, 100_000, 10_000) == (4, 2500)
    assert tile_shape(3, 7, 10_000) == (3, 7)
    assert tile_shape(0, 7, 10_000) == (1, 7)
    assert tile_shape(3, 7, 1) == (1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": float("nan")}, "temperature must be positive"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"tile_bytes": -1}, "tile_bytes must be positive"),
        ({"entropy": "some"}, "entropy must be one of none, detached, train, got 'some'"),
        ({"token_ids": torch.tensor([0, 7])}, r"token ids lie in \[0, 7\], outside the vocabulary of 7"),
        ({"token_ids": torch.tensor([-100, 1])}, r"token ids lie in \[-100, 1\]"),
        ({"token_ids": torch.tensor([[0, 1]])}, r"got hidden \(2, 3\), weight \(7, 3\), token_ids \(1, 2\)"),
        ({"weight": torch.zeros(7, 4)}, r"got hidden \(2, 3\), weight \(7, 4\)"),
        ({"bias": torch.zeros(3)}, r"expected a bias of shape \(7,\), got \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(7, 3), "token_ids": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        hidden_log_probs(**{**arguments, **change})
