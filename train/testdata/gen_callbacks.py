"""Records the decisions of Keras' EarlyStopping and ReduceLROnPlateau for sequences of val_loss and val_accuracy.

Run it with a Python that has TensorFlow and Keras 3; it writes callbacks.json beside itself.
"""

import json
import os

import keras
import numpy as np

rng = np.random.default_rng(7)
model = keras.Sequential([keras.layers.Dense(1)])
model.build((None, 1))


def early(values, monitor, mode, epochs, **cfg):
    c = keras.callbacks.EarlyStopping(monitor=monitor, mode=mode, restore_best_weights=True, **cfg)
    c.set_model(model)
    model.stop_training = False
    c.on_train_begin()
    for epoch in range(epochs):
        c.on_epoch_end(epoch, {monitor: values[epoch]})
        if model.stop_training:
            break
    return {"epochs": epoch + 1, "best": int(c.best_epoch)}


def reduce(values, monitor, mode, epochs, **cfg):
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
    c = keras.callbacks.ReduceLROnPlateau(monitor=monitor, mode=mode, **cfg)
    c.set_model(model)
    c.on_train_begin()
    rates = []
    for epoch in range(epochs):
        c.on_epoch_end(epoch, {monitor: values[epoch]})
        rates.append(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
    return {"rates": rates}


cases = []
for i in range(40):
    epochs = 14
    values = [round(float(x), 2) for x in np.abs(rng.normal(1, 0.2, epochs) - 0.02 * np.arange(epochs))]
    mode = ["min", "max"][int(rng.integers(2))]
    stop = dict(patience=int(rng.integers(0, 5)), min_delta=float(rng.choice([0, 0.05])),
                start_from_epoch=int(rng.choice([0, 0, 3])), baseline=[None, 0.9][int(rng.integers(2))])
    plateau = dict(factor=0.5, patience=int(rng.integers(1, 4)), min_delta=float(rng.choice([1e-4, 0.05])),
                   cooldown=int(rng.integers(0, 3)), min_lr=float(rng.choice([0, 0.1])))
    cases.append({"values": values, "mode": mode, "early_stopping": stop, "reduce_lr": plateau,
                  **early(values, "val_loss", mode, epochs, **stop),
                  **reduce(values, "val_loss", mode, epochs, **plateau)})
with open(os.path.join(os.path.dirname(__file__), "callbacks.json"), "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
