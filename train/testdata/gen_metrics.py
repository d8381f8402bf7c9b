"""Records Keras' values of metrics for random labels, predictions and weights, over several batches.

Run it with a Python that has TensorFlow and Keras 3; it writes metrics.json beside itself.
"""

import json
import os

import keras
import numpy as np

rng = np.random.default_rng(3)
n, classes, batch = 50, 4, 20
binary = rng.integers(0, 2, n).astype("float32")
p = np.clip(rng.normal(0.3 + 0.4 * binary, 0.25), 0, 1).astype("float32")
label = rng.integers(0, classes, n).astype("int32")
logits = (rng.normal(0, 1, (n, classes)) + 1.2 * np.eye(classes)[label]).astype("float32")
weights = rng.choice([0, 0.5, 1, 2], n).astype("float32")


def value(metric, y, x, w=weights):
    for i in range(0, n, batch):
        metric.update_state(y[i : i + batch], x[i : i + batch], sample_weight=w[i : i + batch])
    return np.asarray(metric.result()).tolist()


one_hot = np.eye(classes, dtype="float32")[label]
out = {
    "labels": label.tolist(), "logits": logits.tolist(), "binary": binary.tolist(), "p": p.tolist(),
    "weights": weights.tolist(), "batch": batch,
    "of_binary": {
        "auc": value(keras.metrics.AUC(), binary, p),
        "pr": value(keras.metrics.AUC(curve="PR"), binary, p),
        "auc of 7": value(keras.metrics.AUC(num_thresholds=7), binary, p),
        "precision": value(keras.metrics.Precision(), binary, p),
        "precision at 0.7": value(keras.metrics.Precision(thresholds=0.7), binary, p),
        "recall": value(keras.metrics.Recall(), binary, p),
        "f1": value(keras.metrics.F1Score(threshold=0.5, average="micro"), binary[:, None], p[:, None]),
        "accuracy": value(keras.metrics.BinaryAccuracy(), binary, p),
        "root_mean_squared_error": value(keras.metrics.RootMeanSquaredError(), binary[:, None], p[:, None]),
        "mean_absolute_error": value(keras.metrics.MeanAbsoluteError(), binary[:, None], p[:, None]),
        "mean_squared_error": value(keras.metrics.MeanSquaredError(), binary[:, None], p[:, None]),
    },
    "of_classes": {
        "accuracy": value(keras.metrics.SparseCategoricalAccuracy(), label, logits),
        "top_2_accuracy": value(keras.metrics.SparseTopKCategoricalAccuracy(k=2), label, logits),
        "perplexity": float(np.exp(value(keras.metrics.SparseCategoricalCrossentropy(from_logits=True), label, logits))),
        "f1": value(keras.metrics.F1Score(average="macro"), one_hot, logits),
    },
    "confusion_matrix": np.asarray(
        keras.ops.convert_to_numpy(
            __import__("tensorflow").math.confusion_matrix(label, logits.argmax(-1), weights=weights, dtype="float32"))
    ).flatten().tolist(),
}
with open(os.path.join(os.path.dirname(__file__), "metrics.json"), "w") as f:
    f.write(",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in out.items()).join(["{\n", "\n}\n"]))
