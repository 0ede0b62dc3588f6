from __future__ import annotations

import math

import pytest
import torch
from sparkpin_turboquant import codebook, naive
from sparkpin_turboquant.formats import FORMATS, Format, format_of
from sparkpin_turboquant.rotation import hadamard, rotate, signs, unrotate

DIMS = [64, 128, 256]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distortion(x: torch.Tensor, bits: int = 4) -> float:
    """Mean over vectors of |x - x^|^2 / |x|^2."""
    decoded = naive.dequantise(*naive.quantise(x, bits), bits)
    return float(((decoded - x).square().sum(-1) / x.square().sum(-1)).mean())


def nearest(t: torch.Tensor) -> torch.Tensor:
    """The centroids that float64 numbers are coded as."""
    edges = torch.tensor([-e for e in codebook.edges()[::-1]] + [0.0, *codebook.edges()], dtype=torch.float64)
    return torch.tensor(codebook.lloyd_max(), dtype=torch.float64)[torch.bucketize(t, edges)]


def sylvester(head_dim: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < head_dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix


def test_codebook_is_max_1960() -> None:
    """Table I, 16 levels: the positive centroids, and the error, which is summed up over [-9, 9]."""
    centroids = codebook.lloyd_max()
    assert centroids[8:] == pytest.approx([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], rel=2e-3)
    assert [-c for c in centroids[::-1]] == list(centroids)
    t = torch.linspace(-9, 9, 1_800_001, dtype=torch.float64)
    density = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    assert float((t - nearest(t)).square() @ density) * 1e-5 == pytest.approx(0.0095010, abs=5e-7)


@pytest.mark.parametrize("head_dim", [2, 8, *DIMS])
def test_hadamard_is_the_matrix(head_dim: int) -> None:
    x = gaussian(3, head_dim)
    assert torch.allclose(hadamard(x), x @ sylvester(head_dim) / math.sqrt(head_dim), atol=1e-5)


@pytest.mark.parametrize("head_dim", DIMS)
def test_rotation_is_orthonormal(head_dim: int) -> None:
    eye = torch.eye(head_dim)
    assert torch.allclose(rotate(eye) @ rotate(eye).T, eye, atol=1e-5)
    assert torch.allclose(unrotate(rotate(gaussian(5, head_dim))), gaussian(5, head_dim), atol=1e-5)


def test_signs_are_fixed() -> None:
    """A cache written by one release must be readable by a kernel of another: literal values."""
    assert "".join("+" if s > 0 else "-" for s in signs(32).tolist()) == "++-+-+-++-++++++-+----+++--+-+++"
    assert torch.equal(signs(256)[:64], signs(64))
    assert abs(float(signs(1024).mean())) < 0.1


@pytest.mark.parametrize("head_dim", [0, 1, 80, 96, 100, 2048])
def test_other_head_sizes_are_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        naive.quantise(torch.ones(1, head_dim))


def sphere_distortion(head_dim: int) -> float:
    """Error of the code for one component, times sqrt(D), of a vector spread evenly over the unit sphere.

    Its density is (1 - t^2 / D)^((D - 3) / 2): lighter-tailed than the normal one that the centroids are made for.
    """
    t = torch.linspace(-math.sqrt(head_dim), math.sqrt(head_dim), 400_001, dtype=torch.float64)
    density = (1 - t * t / head_dim).clamp(min=0) ** ((head_dim - 3) / 2)
    return float((t - nearest(t)).square() @ density / density.sum())


@pytest.mark.parametrize(("head_dim", "error"), [(64, 0.0089), (128, 0.0092), (256, 0.0094)])
def test_distortion_on_gaussian_vectors(head_dim: int, error: float) -> None:
    measured = distortion(gaussian(4000, head_dim))
    assert measured == pytest.approx(error, rel=0.01)
    assert measured == pytest.approx(sphere_distortion(head_dim), rel=0.04)


@pytest.mark.parametrize("head_dim", DIMS)
def test_distortion_on_constant_vectors_and_hadamard_rows(head_dim: int) -> None:
    """The inputs that an unsigned Hadamard transform turns into one spike.

    Signed, each row becomes a permutation of the signs' own spectrum: all have one error, which depends on the signs.
    """
    rows = sylvester(head_dim)
    errors = [distortion(row.unsqueeze(0)) for row in rows]
    assert max(errors) == pytest.approx(min(errors), rel=1e-3)
    assert 0.006 < errors[0] < 0.0097
    assert distortion(torch.full((1, head_dim), -3.5)) == pytest.approx(errors[0], rel=1e-3)


def test_without_signs_a_constant_vector_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin_turboquant.rotation.signs", lambda head_dim: torch.ones(head_dim))
    assert distortion(torch.ones(1, 256)) > 0.3


@pytest.mark.parametrize("head_dim", DIMS)
def test_distortion_with_outlier_channels(head_dim: int) -> None:
    x = gaussian(1000, head_dim)
    x[:, 3] *= 20
    x[:, 17] *= -15
    assert distortion(x) < 0.0097


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_error_is_relative_to_the_norm(factor: float) -> None:
    assert distortion(gaussian(500, 128) * factor) == pytest.approx(distortion(gaussian(500, 128)), rel=0.01)


@pytest.mark.parametrize("head_dim", DIMS)
def test_norm_is_kept(head_dim: int) -> None:
    x = gaussian(200, head_dim) * 3
    decoded = naive.dequantise(*naive.quantise(x))
    assert torch.allclose(decoded.norm(dim=-1), x.norm(dim=-1), rtol=6e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_vector_stays_zero_and_large_norms_are_held(bits: int) -> None:
    codes, norms = naive.quantise(torch.stack((torch.zeros(64), torch.full((64,), 1e7))), bits)
    decoded = naive.dequantise(codes, norms, bits)
    assert bool((decoded[0] == 0).all())
    assert norms[1] == naive.FLOAT16_MAX and bool(torch.isfinite(decoded[1]).all())


@pytest.mark.parametrize("bits", [4, 8])
def test_nan_stays_nan_and_infinity_is_held(bits: int) -> None:
    """Two infinite components have no direction, so they are NaN, too."""
    x = gaussian(4, 64)
    x[0, 5], x[1, 63], x[2, 3] = torch.nan, torch.inf, -torch.inf
    x[2, 9] = torch.inf
    norms = naive.quantise(x, bits)[1]
    assert norms.isnan().tolist() == [True, False, True, False]
    assert norms[1] == naive.FLOAT16_MAX


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head_dim", DIMS)
def test_pack_unpack(head_dim: int, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 3, head_dim), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = naive.pack_keys(codes, bits)
    assert packed.shape == (5, 3, head_dim * bits // 8) and packed.dtype == torch.uint8
    assert torch.equal(naive.unpack_keys(packed, bits), codes)
    if bits == 4:
        packed = naive.pack_values(codes)
        assert packed.shape == (5, 3, head_dim // 2) and packed.dtype == torch.uint8
        assert torch.equal(naive.unpack_values(packed), codes)


def test_packed_bytes_are_these() -> None:
    """What kernels read, see `formats.Layout`."""
    codes = torch.arange(8, dtype=torch.uint8)
    assert naive.pack_keys(codes, 4).view(torch.int32).item() == 0x76543210
    signs = [naive.pack_keys(8 * (codes == i).to(torch.uint8), 4).view(torch.int32).item() for i in range(8)]
    assert [sign % 2**32 for sign in signs] == [1 << bit for bit in (7, 15, 23, 31, 3, 11, 19, 27)]
    assert naive.pack_values(torch.tensor([1] * 8 + [2] * 8, dtype=torch.uint8)).tolist() == [0x21] * 8


@pytest.mark.parametrize("head_dim", DIMS)
def test_each_byte_of_values_has_its_place(head_dim: int) -> None:
    """And the four tokens 4 t to 4 t + 3 of one component lie in one word: an operand of a product."""
    places = naive.value_places(head_dim)
    assert sorted(places.flatten().tolist()) == list(range(8 * head_dim))
    assert torch.equal(
        places.unflatten(1, (4, 4)) - places[:, ::4, None], torch.arange(4).expand(places.shape[0], 4, 4)
    )
    assert bool((places[:, ::4] % 4 == 0).all())


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_blocks_hold_what_was_quantised(format: Format, head_dim: int) -> None:
    """Blocks of 32 tokens, written in any order; bytes that no slot needs stay as they were."""
    slot = format.slot_bytes(head_dim) + 2
    data = torch.full((3, 2 * 32 * slot), 0xAB, dtype=torch.uint8)
    blocks = naive.Blocks(data, format, 2, head_dim, 32, slot)
    key, value = gaussian(7, 2, head_dim), gaussian(7, 2, head_dim, seed=1)
    slots = torch.tensor([95, 0, 17, 33, 64, 15, 16])
    blocks.write(key, value, slots)
    got_key, got_value = blocks.read_rotated(slots)
    for got, x, bits in ((got_key, key, format.key_bits), (got_value, value, 4)):
        assert torch.equal(got, naive.dequantise_rotated(*naive.quantise(x, bits), bits))
    assert bool((data.view(3, 2, -1)[..., 32 * format.slot_bytes(head_dim) :] == 0xAB).all())


def test_other_formats_are_refused() -> None:
    assert all(format_of(name) is format for name, format in FORMATS.items())
    with pytest.raises(ValueError, match=r"turboquant_3bit_nc, expected one of turboquant_k8v4, turboquant_4bit_nc"):
        format_of("turboquant_3bit_nc")


@pytest.mark.parametrize("head_dim", DIMS)
def test_distortion_of_8_bits(head_dim: int) -> None:
    assert distortion(gaussian(2000, head_dim), 8) <= 1e-4


def test_attention_is_causal_and_grouped() -> None:
    """Against torch's own attention, one KV head at a time."""
    query, key, value = gaussian(3, 6, 64), gaussian(10, 2, 64, seed=1), gaussian(10, 2, 64, seed=2)
    got = naive.attention(query, key, value, scale=0.125)
    for head in range(6):
        for i in range(3):
            seen = 10 - 3 + i + 1
            scores = (key[:seen, head // 3] @ query[i, head]) * 0.125
            assert torch.allclose(got[i, head], scores.softmax(0) @ value[:seen, head // 3], atol=1e-6)
