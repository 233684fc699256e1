"""A reader of every body format, written from docs/wire-format.md in plain Python: no tensors, no library code.

`read(codec, body, n, step, bucket)` takes the settings from the codec's fields and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

WORD = 0xFFFFFFFF
SIGNS, INDICES, SKETCH = 0x4841444D, 0x52414E44, 0x43534B48


def read(codec: Any, body: bytes, n: int, *, step: int = 0, rank: int = 0, bucket: int = 0) -> list[float]:
    """The n decoded numbers, each a float32 value."""
    if getattr(codec, "mode", None) == "unbiased":
        bucket += (rank + 1) << 32  # the bucket is only ever added to the seed
    if n == 0:
        assert body == b""
        return []
    out = READERS[type(codec).__name__](codec, body, n, step, bucket)
    assert len(out) == n
    return out


def fl(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def f32(data: bytes) -> list[float]:
    return [value for (value,) in struct.iter_unpack("<f", data)]


def bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def fields(data: bytes, width: int, count: int, *, signed: bool = False) -> list[int]:
    stream = int.from_bytes(data, "little")
    values = [stream >> i * width & ((1 << width) - 1) for i in range(count)]
    return [v - (1 << width) if signed and v >> (width - 1) else v for v in values]


def pad4(size: int) -> int:
    return (size + 3) // 4 * 4


def sections(data: bytes, *sizes: int) -> Iterator[bytes]:
    """Sections of these sizes, each padded to 4 bytes; together they are all of `data`."""
    at = 0
    for size in sizes:
        assert not any(data[at + size : at + pad4(size)])
        yield data[at : at + size]
        at += pad4(size)
    assert at == len(data)


@lru_cache(maxsize=4096)
def philox(q: int, stream: int, step: int, seed: int) -> list[int]:
    a, b, c, d = q & WORD, q >> 32 & WORD, stream, step & WORD
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        p, r = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (r >> 32) ^ b ^ k0, r & WORD, (p >> 32) ^ d ^ k1, p & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [a, b, c, d]


def fmix32(h: int) -> int:
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def sign(i: int, step: int, seed: int) -> float:
    word = philox(i >> 7, SIGNS, step, seed)[i >> 5 & 3]
    return -1.0 if word >> (i & 31) & 1 else 1.0


def permutation(n: int, step: int, seed: int) -> Callable[[int], int]:
    half = (max(8, (n - 1).bit_length()) + 1) // 2
    keys = philox(0, INDICES, step, seed) + philox(1, INDICES, step, seed)

    def pi(v: int) -> int:
        while True:
            left, right = v >> half, v & ((1 << half) - 1)
            for key in keys:
                left, right = right, left ^ fmix32((right * 0x9E3779B1 + key) & WORD) & ((1 << half) - 1)
            v = left << half | right
            if v < n:
                return v

    return pi


def read_cast(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    size, form = {"f32": (4, "<f"), "fp16": (2, "<e"), "bf16": (2, "")}[codec.format]
    (numbers,) = sections(body, size * n)
    return [value for (value,) in struct.iter_unpack(form, numbers)] if form else bf16(numbers)


def read_int(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    nb, bits, block = -(-n // codec.block), codec.bits, codec.block
    per_scale = 8 if codec.affine else {"f32": 4, "bf16": 2, "pow2": 1}[codec.scale]
    scales, codes = sections(body, nb * per_scale, (n * bits + 7) // 8)
    if codec.affine:
        pairs = f32(scales)
        return [
            fl(pairs[i // block * 2] + fl(q * pairs[i // block * 2 + 1])) for i, q in enumerate(fields(codes, bits, n))
        ]
    if codec.scale == "pow2":
        s = [struct.unpack("<f", struct.pack("<I", c << 23))[0] for c in scales]
    else:
        s = f32(scales) if codec.scale == "f32" else bf16(scales)
    return [fl(q * s[i // block]) for i, q in enumerate(fields(codes, bits, n, signed=True))]


def read_float8(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    scales, codes = sections(body, -(-n // codec.block) * 4, n)
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[codec.format]
    out = []
    for i, code in enumerate(codes):
        exponent, m = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
        size = math.ldexp(m + (1 << mantissa if exponent else 0), max(exponent, 1) - bias - mantissa)
        out.append(fl((-size if code >> 7 else size) * f32(scales)[i // codec.block]))
    return out


def read_e3m0(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    scales, codes = sections(body, -(-n // codec.block) * (1 if codec.scale == "pow2" else 4), (n + 1) // 2)
    wide = b"".join(struct.pack("<I", c << 23) for c in scales) if codec.scale == "pow2" else scales
    sizes = [0.0] + [2.0 ** (k - 7) for k in range(1, 8)]
    signed = [-sizes[code & 7] if code & 8 else sizes[code] for code in fields(codes, 4, n)]
    return [fl(size * f32(wide)[i // codec.block]) for i, size in enumerate(signed)]


def read_norm(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    levels, block = codec.levels, codec.block
    width = (2 * levels).bit_length()
    blocks = -(-n // block)
    scales, codes = sections(body, 4 * blocks, (n * width + 7) // 8)
    norms, values = f32(scales), []
    for i, q in enumerate(fields(codes, width, n, signed=True)):
        norm = norms[i // block]
        if type(codec).__name__ == "QSGD":
            unit = fl(norm / levels)
            unit = unit if abs(unit * levels) < 2.0**128 * (1 - 2.0**-25) else next_below(unit)
            size = fl(abs(q) * unit)
        else:
            size = fl(2.0 ** (min(abs(q), levels) - levels) * norm) if q else 0.0
        values.append(-size if q < 0 else size)
    return values


def next_below(positive: float) -> float:
    return float(struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", positive))[0] - 1))[0])


def read_zeropp(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    scales, codes = sections(body, 4 * -(-n // codec.block), (n * codec.bits + 7) // 8)
    steps = f32(scales)
    return [fl(q * steps[i // codec.block]) for i, q in enumerate(fields(codes, codec.bits, n, signed=True))]


def read_natural(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    sizes = [2.0 ** ((code & 127) - 109) if code & 127 else 0.0 for code in body[:n]]
    return [-size if code > 127 else size for size, code in zip(sizes, body, strict=False)]


def read_codebook(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    tables, codes = sections(body, 1024 * -(-n // codec.block), n)
    entries = f32(tables)
    return [entries[i // codec.block * 256 + code] for i, code in enumerate(codes)]


def read_sign(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    per_scale = {"l1": 4, "l2": 4, "two_means": 8, "none": 0}[codec.scale]
    scales, bits = sections(body, -(-n // codec.block) * per_scale, (n + 7) // 8)
    numbers = f32(scales)
    if codec.scale == "two_means":
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    else:
        pairs = [(s, -s) for s in numbers]
    return [
        (1.0, -1.0)[bit] if codec.scale == "none" else pairs[i // codec.block][bit]
        for i, bit in enumerate(fields(bits, 1, n))
    ]


def read_stosign(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    bound = [codec.bound] * n if isinstance(codec.bound, float) else codec.bound.tolist()
    return [-g if bit else g for g, bit in zip(bound, fields(body, 1, n), strict=True)]


def read_ternary(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    base3 = codec.packing == "base3"
    scales, codes = sections(body, 4 * -(-n // codec.block), -(-n // 5) if base3 else -(-n // 4))
    trits = [codes[i // 5] // 3 ** (i % 5) % 3 for i in range(n)] if base3 else fields(codes, 2, n)
    s = f32(scales)
    return [(0.0, s[i // codec.block], -s[i // codec.block])[trit] for i, trit in enumerate(trits)]


LEVELS = {
    2: (0.4527800346, 1.5104176085),
    3: (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    4: (0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
}


def read_eden(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    sizes = [codec.block] * (n // codec.block)
    if n % codec.block:
        sizes.append(1 << (n % codec.block - 1).bit_length())
    scales, packed = sections(body, 4 * len(sizes), (sum(sizes) * codec.bits + 7) // 8)
    codes, out = fields(packed, codec.bits, sum(sizes)), []
    levels = [fl(v) for c in LEVELS.get(codec.bits, ()) for v in (c, -c)]
    levels = sorted(levels) or [1.0, -1.0]
    for block, (s, size) in enumerate(zip(f32(scales), sizes, strict=True)):
        first, factor = block * codec.block, fl(size**-0.5)
        exact = size.bit_length() % 2 == 1
        start = fl(s * factor) if exact else s
        y = butterflies([fl(start * levels[code]) for code in codes[first : first + size]])
        if not exact:
            y = [fl(value * factor) for value in y]
        count = min(size, n - first)
        out += [y[i] * sign(first + i, step, codec.seed + bucket) if s else 0.0 for i in range(count)]
    return out


def butterflies(y: list[float]) -> list[float]:
    stride = 1
    while stride < len(y):
        for i in range(len(y)):
            if not i & stride:
                a, b = y[i], y[i | stride]
                y[i], y[i | stride] = fl(a + b), fl(a - b)
        stride *= 2
    return y


def read_indices(index: str, section: bytes, c: int, k: int, rows: int) -> list[list[int] | None]:
    if index == "elias_fano":
        low = int(math.log2(c // k))
        size = (k * low + k + (c >> low) + 7) // 8
        return [elias_fano(section[r * size : (r + 1) * size], low, k, c) for r in range(rows)]
    if index == "bitmap":
        bits = fields(section, 1, rows * c)
        kept = [[p for p in range(c) if bits[r * c + p]] for r in range(rows)]
        return [row or None for row in kept]
    width = 32 if index == "u32" else math.ceil(math.log2(c))
    values = fields(section, width, rows * k) if width else [0] * (rows * k)
    out: list[list[int] | None] = []
    for r in range(rows):
        row = values[r * k : (r + 1) * k]
        empty = not any(row) and not (k == 1 and (index == "bits" or r == 0))
        out.append(None if empty else [v - r * c if index == "u32" else v for v in row])
    return out


def elias_fano(record: bytes, low: int, k: int, c: int) -> list[int] | None:
    bits = fields(record, 1, k * low + k + (c >> low))
    lows = [sum(bits[j * low + b] << b for b in range(low)) for j in range(k)]
    places = [p for p, bit in enumerate(bits[k * low :]) if bit]
    return [(p - j << low) + lows[j] for j, p in enumerate(places)] if places else None


def read_rows(codec: Any, body: bytes, c: int, k: int, rows: int) -> list[float]:
    """All rows * c numbers of a sparse body."""
    value, index = codec.value, codec.index
    per_row = {"mag2": 4, "sign1": 2, "int8": 4, "int4": 4}.get(value, 0)
    width = {"f32": 32, "bf16": 16, "mag2": 2, "sign1": 1, "int8": 8, "int4": 4, "bins4": 2}[value]
    if index == "elias_fano":
        low = int(math.log2(c // k))
        index_size = rows * ((k * low + k + (c >> low) + 7) // 8)
    else:
        bits = {"bits": k * math.ceil(math.log2(c)), "bitmap": c, "u32": 32 * k}[index]
        index_size = (rows * bits + 7) // 8
    scale_size = 16 if value == "bins4" else rows * per_row
    scales, indices, codes = sections(body, scale_size, index_size, (rows * k * width + 7) // 8)
    if value in ("f32", "bf16"):
        values = f32(codes) if value == "f32" else bf16(codes)
    else:
        q = fields(codes, width, rows * k, signed=value.startswith("int"))
        levels = bf16(scales) if value in ("mag2", "sign1") else f32(scales)
        values = [sparse_value(value, q[i], levels, i // k) for i in range(rows * k)]
    out = [0.0] * (rows * c)
    for r, positions in enumerate(read_indices(index, indices, c, k, rows)):
        for j, position in enumerate(positions or []):
            out[r * c + position] = values[r * k + j]
    return out


def sparse_value(value: str, q: int, levels: list[float], row: int) -> float:
    if value == "bins4":
        return levels[q]
    if value.startswith("int"):
        return fl(q * levels[row])
    level = levels[2 * row + (q >> 1)] if value == "mag2" else levels[row]
    return -level if q & 1 else level


def largest_divisor(size: int, limit: int) -> int:
    return max(d for d in range(1, min(size, limit) + 1) if size % d == 0)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def untile(tiles: list[float], height: int, width: int, h: int, w: int) -> list[float]:
    out = [0.0] * (height * width)
    for i, value in enumerate(tiles):
        tile, place = divmod(i, h * w)
        row, column = tile // (width // w) * h + place // w, tile % (width // w) * w + place % w
        out[row * width + column] = value
    return out


def sparse_size(codec: Any, c: int, k: int, rows: int) -> int:
    """Bytes of a sparse body."""
    low = int(math.log2(c // k))
    record = (k * low + k + (c >> low) + 7) // 8
    per_index = {"bits": k * math.ceil(math.log2(c)), "bitmap": c, "u32": 32 * k}
    index = rows * record if codec.index == "elias_fano" else (rows * per_index[codec.index] + 7) // 8
    scale = 16 if codec.value == "bins4" else rows * {"mag2": 4, "sign1": 2, "int8": 4, "int4": 4}.get(codec.value, 0)
    width = {"f32": 32, "bf16": 16, "mag2": 2, "sign1": 1, "int8": 8, "int4": 4, "bins4": 2}[codec.value]
    return pad4(scale) + pad4(index) + pad4((rows * k * width + 7) // 8)


def read_topk(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    if codec.scope in ("chunk", "global"):
        c = codec.chunk if codec.scope == "chunk" else n
        k = min(c, codec.k if codec.k is not None else max(1, round(codec.density * c)))
        return read_rows(codec, body, c, k, -(-n // c))[:n]
    out, at = [], 0
    for shape in codec.shapes:
        numel = math.prod(shape)
        if not numel:
            continue
        height, width = as_matrix(shape)
        side = math.isqrt(codec.chunk)
        h, w = (
            (largest_divisor(height, side), largest_divisor(width, side))
            if codec.scope == "tile2d"
            else (height, width)
        )
        base = codec.chunk if codec.scope == "tile2d" else h * w
        k = min(h * w, codec.k if codec.k is not None else max(1, round(codec.density * base)))
        size = sparse_size(codec, h * w, k, numel // (h * w))
        out += untile(read_rows(codec, body[at : at + size], h * w, k, numel // (h * w)), height, width, h, w)
        at += size
    assert at == len(body)
    return out


def cosines(n: int) -> list[list[float]]:
    return [
        [fl(math.sqrt((1 if k == 0 else 2) / n) * math.cos(math.pi * (2 * i + 1) * k / (2 * n))) for i in range(n)]
        for k in range(n)
    ]


def inverse_tile(x: list[list[float]], h: int, w: int) -> list[float]:
    along_columns, along_rows = cosines(h), cosines(w)
    u = [[0.0] * w for _ in range(h)]
    for k in range(h):
        for j in range(w):
            for l in range(w):  # noqa: E741
                u[k][j] = fl(u[k][j] + fl(x[k][l] * along_rows[l][j]))
    out = []
    for i in range(h):
        for j in range(w):
            total = 0.0
            for k in range(h):
                total = fl(total + fl(along_columns[k][i] * u[k][j]))
            out.append(total)
    return out


def read_dct(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    side = codec.side
    shapes = codec.shapes or ((-(-n // side**2) * side, side),)
    out, at = [], 0
    for shape in shapes:
        numel = math.prod(shape)
        if not numel:
            continue
        height, width = as_matrix(shape)
        h, w = largest_divisor(height, side), largest_divisor(width, side)
        k, rows = min(codec.k, h * w), numel // (h * w)
        size = sparse_size(codec, h * w, k, rows)
        coefficients = read_rows(codec, body[at : at + size], h * w, k, rows)
        tiles = []
        for r in range(rows):
            flat = coefficients[r * h * w : (r + 1) * h * w]
            tiles += inverse_tile([flat[i * w : (i + 1) * w] for i in range(h)], h, w)
        out += untile(tiles, height, width, h, w)
        at += size
    assert at == len(body)
    return out[:n]


def read_powersgd(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    side, r = math.isqrt(n), codec.rank
    shapes = codec.shapes or ((side, n // side), (n - side * (n // side),))
    compressed = []
    for shape in shapes:
        rows, cols = as_matrix(shape)
        compressed.append(len(shape) > 1 and codec.min_rate * r * (rows + cols) < rows * cols)
    matrices = [as_matrix(shape) for shape, yes in zip(shapes, compressed, strict=True) if yes]
    exact = sum(math.prod(shape) for shape, yes in zip(shapes, compressed, strict=True) if not yes)
    count = r * sum(rows + cols for rows, cols in matrices) + exact
    numbers = iter(f32(body) if codec.factors is None else read(codec.factors, body, count, step=step, bucket=bucket))
    left = [[[next(numbers) for _ in range(r)] for _ in range(rows)] for rows, _ in matrices]
    right = [[[next(numbers) for _ in range(r)] for _ in range(cols)] for _, cols in matrices]
    out, pairs = [], iter(zip(left, right, strict=True))
    for shape, yes in zip(shapes, compressed, strict=True):
        if not yes:
            out += [next(numbers) for _ in range(math.prod(shape))]
            continue
        p, q = next(pairs)
        for row in p:
            for column in q:
                total = fl(row[0] * column[0])
                for a in range(1, r):
                    total = fl(total + fl(row[a] * column[a]))
                out.append(total)
    assert next(numbers, None) is None
    return out


def read_countsketch(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    table, w = f32(body), max(1, math.ceil(codec.density * n / codec.rows))
    assert len(table) == codec.rows * w
    out = []
    for i in range(n):
        estimates = []
        for j in range(codec.rows):
            k0, k1, _, _ = philox(j, SKETCH, 0, codec.seed + bucket)
            cell = table[j * w + (fmix32((i * 0x9E3779B1 + k0) & WORD) * w >> 32)]
            estimates.append(-cell if fmix32((i * 0x9E3779B1 + k1) & WORD) & 1 else cell)
        estimates.sort()
        low, high = estimates[(codec.rows - 1) // 2], estimates[codec.rows // 2]
        out.append(low if codec.rows % 2 else fl(fl(low + high) * 0.5))
    return out


def read_srht(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    numbers, out, seed = iter(f32(body)), [], codec.seed + bucket
    for first in range(0, n, codec.chunk):
        size = codec.chunk
        while size >= 2 * (n - first):
            size //= 2
        k, pi = max(1, round(codec.density * size)), permutation(size, step, seed)
        y = [0.0] * size
        for i in range(k):
            y[pi(i)] = fl(next(numbers) * (1.0 if codec.contractive else fl(size / k)))
        y = butterflies(y)
        out += [fl(value * fl(size**-0.5)) * sign(first + i, step, seed) for i, value in enumerate(y[: n - first])]
    assert next(numbers, None) is None
    return out


def read_randomk(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    k, seed, out = min(n, max(1, round(codec.density * n))), codec.seed + bucket, [0.0] * n
    if n == 0:
        return out
    pi = permutation(n, step, seed)
    draws = [word for q in range((k + 3) // 4) for word in philox(q, INDICES, step, seed)]
    for j, value in enumerate(f32(body)):
        start, stop = j * n // k, (j + 1) * n // k
        places = {"permuted": lambda j=j: pi(j), "block": lambda j=j: (pi(0) + j) % n}
        stratum = start + int((draws[j] >> 8) * 2.0**-24 * (stop - start))
        out[places[codec.method]() if codec.method in places else stratum] = value
    return out


def read_list(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    (count,) = struct.unpack("<I", body[:4])
    assert len(body) == 4 + 8 * math.ceil(codec.density * n) and not any(body[4 + 8 * count :])
    positions = struct.unpack(f"<{count}I", body[4 : 4 + 4 * count])
    assert list(positions) == sorted(set(positions))
    out = [0.0] * n
    for position, value in zip(positions, f32(body[4 + 4 * count : 4 + 8 * count]), strict=True):
        out[position] = value
    return out


def read_mixed(codec: Any, body: bytes, n: int, step: int, bucket: int) -> list[float]:
    out, at = [], 0
    for i, (part, numel) in enumerate(codec.runs):
        size = part.nbytes(numel)  # the one thing taken from the library: how long a neighbour's body is
        out += read(part, body[at : at + size], numel, step=step, bucket=bucket + (i << 48))
        at += size
    assert at == len(body)
    return out


READERS: dict[str, Callable[[Any, bytes, int, int, int], list[float]]] = {
    "Cast": read_cast,
    "Int": read_int,
    "Int2": read_int,
    "Int4": read_int,
    "Int8": read_int,
    "Float8": read_float8,
    "E3M0": read_e3m0,
    "QSGD": read_norm,
    "NuQSGD": read_norm,
    "ZeroPlusPlus": read_zeropp,
    "NaturalCompression": read_natural,
    "Codebook": read_codebook,
    "Sign": read_sign,
    "StoSign": read_stosign,
    "Ternary": read_ternary,
    "Eden": read_eden,
    "TopK": read_topk,
    "DCTTopK": read_dct,
    "PowerSGD": read_powersgd,
    "CountSketch": read_countsketch,
    "SRHT": read_srht,
    "RandomK": read_randomk,
    "Threshold": read_list,
    "SampledTopK": read_list,
    "Mixed": read_mixed,
}
