"""Writes the TensorFlow checkpoint that TestTensorFlow reads, and the values that TensorFlow reads from it.

Usage: python make_tensorflow.py FOLDER (with tensorflow-cpu 2.21 and its Keras)
"""
import json
import sys

import numpy as np
import tensorflow as tf

dir = sys.argv[1]
tf.random.set_seed(1)
model = tf.keras.Sequential([
    tf.keras.Input((5,)),
    tf.keras.layers.Dense(7, activation="relu", name="hidden"),
    tf.keras.layers.BatchNormalization(name="norm"),
    tf.keras.layers.Dense(3, name="readout"),
])
rng = np.random.default_rng(1)
kinds = {}
for t in [tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.float16, tf.bfloat16,
          tf.float32, tf.float64]:
    value = tf.cast(rng.integers(0, 2 if t == tf.bool else 100, size=(2, 3)), t)
    kinds["v_" + t.name] = tf.Variable(value, name=t.name)
# 300 variables fill more than one block of the index.
many = [tf.Variable(rng.standard_normal(2).astype(np.float32)) for _ in range(300)]
checkpoint = tf.train.Checkpoint(model=model, scalar=tf.Variable(2.5), empty=tf.Variable(np.zeros((0, 4), np.float32)),
                                 many=many, **kinds)
path = checkpoint.save(dir + "/ckpt")
reader = tf.train.load_checkpoint(path)
suffix = "/.ATTRIBUTES/VARIABLE_VALUE"
expected = {}
for name, shape in sorted(reader.get_variable_to_shape_map().items()):
    value = reader.get_tensor(name)
    if reader.get_variable_to_dtype_map()[name] != tf.string:
        expected[name.removesuffix(suffix)] = [reader.get_variable_to_dtype_map()[name].name, shape, value.tobytes().hex()]
with open(dir + "/expected.json", "w") as f:
    json.dump(expected, f, indent=0)
