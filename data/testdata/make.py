# Writes the files beside it that other programs' readers and writers agree on: NumPy's arrays and a TFRecord file of
# TensorBoard's writer. Run: python make.py (numpy 2.2.6, tensorboard 2.21)
import numpy as np
from tensorboard.summary.writer.record_writer import RecordWriter

for name, a in {
    "bool": np.array([[True, False]]),
    "i1": np.arange(-3, 3, dtype="i1"),
    "u1": np.arange(6, dtype="u1").reshape(3, 2),
    "i2big": np.arange(-3, 3, dtype=">i2"),
    "u2": np.arange(6, dtype="<u2"),
    "i4": np.arange(24, dtype="i4").reshape(2, 3, 4) * 1000,
    "u4": np.array([4294967295], "u4"),
    "i8": np.array([-(2**63), 2**63 - 1]),
    "u8": np.array([2**64 - 1], "u8"),
    "f2": np.array([0.5, -65504, np.inf], "f2"),
    "f4": np.array([[1.5, -2.5], [3.25, 1e10]], "f4"),
    "f8big": np.array([1e300, -0.1], ">f8"),
    "scalar": np.array(7.5),
    "empty": np.zeros((0, 3), "f4"),
}.items():
    np.save(f"npy-{name}.npy", a)
np.save("npy-fortran.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
np.save("npy-struct.npy", np.zeros(2, [("a", "i4"), ("b", "f4")]))
np.save("npy-complex.npy", np.zeros(2, "c8"))
with open("npy-version2.npy", "wb") as f:
    np.lib.format.write_array(f, np.arange(3, dtype="i4"), version=(2, 0))

with open("records.tfrecord", "wb") as f:
    w = RecordWriter(f)
    for r in [b"", b"a", b"lock" * 1000, bytes(range(256))]:
        w.write(r)
    w.flush()
