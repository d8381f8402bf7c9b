# Writes print.json: arrays and what NumPy prints for them. Run: python print.py > print.json
# (numpy 2.2.6, ml_dtypes 0.6.0; numpy 1.14 to 2.2 print alike, later ones go over to exponents sooner.)
import json
import random

import ml_dtypes
import numpy as np

random.seed(1)
cases = []


def add(name, a):
    a = np.asarray(a)
    flat = a.ravel()
    if a.dtype == object:
        dtype, data = "string", [x.decode("latin-1") for x in flat]
    elif a.dtype.kind in "iub":
        dtype, data = str(a.dtype), [int(x) for x in flat]
        data = [str(x) for x in data]
    else:
        dtype, data = str(a.dtype), [repr(float(x)) for x in flat]
    if len(data) > 100:  # element i is i * step + start
        data, step = data[:1], float(flat[1]) - float(flat[0])
        assert all(float(x) == i * step + float(flat[0]) for i, x in enumerate(flat))
    else:
        step = 0
    cases.append({"name": name, "dtype": dtype, "shape": list(a.shape), "data": data, "step": step, "want": str(a), "repr": repr(a)})


F = ["float16", "float32", "float64"]
for t in F:
    for x in [0.0, -0.0, 1, -1.5, 0.1, 1e-4, 9.9e-5, 123456, 60000, 1 / 3, float("nan"), float("inf"), -float("inf")]:
        add(f"{t} scalar {x}", np.array(x, t))
    for v in [[], [0], [1], [1, 2.5], [1, -2.5, 100], [0.1], [0.1, 0.25], [1e-4, 1], [1e-5, 1], [1e-3, 1], [1e-3, 1.5],
              [0.001, 0.9], [0, 1e-5], [1e4, 1], [1000, 1], [1001, 1], [float("nan"), 1.5, float("inf")],
              [float("nan")], [-float("inf")], [-float("inf"), 1], [float("inf"), 1e-5], [-1e-5, 10], [float("nan"), 1e-6],
              [1 / 3, 2 / 3], [-0.0, 0.0], [65504, 1], [5.9604645e-08], list(range(30)), [x / 7 for x in range(40)]]:
        add(f"{t} {str(v)[:40]}", np.array(v, t))
for t in F[1:]:
    for x in [1e15, 1e16, 123456789.0, 1.5e16, 1e-7, 3.4e38, 16777216.0, 1e22, 1e21]:
        add(f"{t} scalar {x}", np.array(x, t))
    for v in [[1e8, 1], [99999999, 99999998], [1e8], [1e10, 2.5e10], [123456789.125, 1], [3.4e38], [1.23456789e-5, 1e20],
              [0.123456789012, 1], [1.000000001, 1]]:
        add(f"{t} {str(v)[:40]}", np.array(v, t))
add("float64 wide exponents", np.array([1e-300, 1e100]))
add("float64 scalar 1e300", np.array(1e300))
for t in ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]:
    i = np.iinfo(t)
    add(f"{t} scalar", np.array(i.max, t))
    add(f"{t} ends", np.array([i.min, 0, i.max], t))
    add(f"{t} matrix", np.arange(12, dtype=t).reshape(3, 4) * 7)
add("bool scalar", np.array(True))
add("bools", np.array([True, False]))
add("trues", np.array([True, True]))
add("bool matrix", np.array([[True], [False]]))
for s in [[b"a", b"bcd"], [b""], [b"it's"], [b'"'], [b"'\""], [b"\x00\xff\n\t\r\\"]]:
    add(f"string {s}", np.array(s, object))
add("string matrix", np.array([[b"a", b"b"], [b"ccc", b"d"]], object))
for shape in [(2, 2), (1, 1), (2, 3, 2), (2, 2, 2, 2), (0, 3), (2, 0), (3, 1), (1, 30), (2, 40), (1000,), (1001,), (2000,),
              (7, 200), (200, 7), (10, 10, 11), (2, 2, 300), (40, 40), (5, 5, 5, 5, 5), (6, 200), (1, 1001)]:
    n = int(np.prod(shape))
    add(f"int32 {shape}", np.arange(n, dtype="int32").reshape(shape))
    add(f"float32 {shape}", (np.arange(n, dtype="float32") / 8 - 3).reshape(shape))
for k in range(60):
    t = random.choice(F[1:])
    n = random.randint(1, 24)
    lo, hi = sorted([random.randint(-7, 9), random.randint(-7, 9)])
    v = [random.choice([-1, 1]) * random.random() * 10 ** random.randint(lo, hi) for _ in range(n)]
    v = [round(x, random.randint(0, 9)) if random.random() < 0.3 else x for x in v]
    add(f"{t} random {k}", np.array(v, t))
for k in range(30):
    n = random.randint(1, 12)
    bits = np.array([random.randrange(1 << 16) for _ in range(n)], "uint16")
    add(f"float16 random {k}", bits.view("float16"))
bf = ml_dtypes.bfloat16
for x in [0, 1, 2.5, -3, 3.140625, 1e10, 1e-10, 123456, 1 / 3, float("nan"), float("inf"), -float("inf")]:
    add(f"bfloat16 scalar {x}", np.array(x, bf))
for v in [[1, 2.5], [1e-10, 1], [100, -3, 0.5], [float("nan"), 1], [float("-inf"), 1e38], [1 / 3, 1 / 7]]:
    add(f"bfloat16 {v}", np.array(v, bf))
add("bfloat16 matrix", np.arange(6).reshape(2, 3).astype(bf))

print("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]")
