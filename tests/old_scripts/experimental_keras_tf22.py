"""TensorFlow 2.2: tf.keras.mixed_precision.experimental, with fit and with a loop of one's own."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.keras.mixed_precision import experimental as mixed_precision

tf.random.set_seed(1)
policy = mixed_precision.Policy("mixed_float16")
mixed_precision.set_policy(policy)
print("Compute dtype:", policy.compute_dtype, "Variable dtype:", policy.variable_dtype)
print("Loss scale period:", policy.loss_scale.increment_period)

inputs = keras.Input(shape=(8,), name="features")
hidden = layers.Dense(32, activation="relu", name="dense_1")
x = hidden(inputs)
assert mixed_precision.get_layer_policy(hidden).name == mixed_precision.global_policy().name == "mixed_float16"
x = layers.Dense(2, name="dense_logits")(x)
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
model = keras.Model(inputs=inputs, outputs=outputs)

rng = np.random.RandomState(0)
x_train = rng.randn(128, 8).astype("float32")
y_train = (x_train.sum(axis=1) > 0).astype("int64")

model.compile(loss="sparse_categorical_crossentropy", optimizer=keras.optimizers.RMSprop(), metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=32, epochs=4, verbose=0)
print("fit:", type(model.optimizer).__name__, "scale", int(model.optimizer.loss_scale()))
assert isinstance(model.optimizer, mixed_precision.LossScaleOptimizer)
print("fit learned", history.history["loss"][-1] < history.history["loss"][0])

optimizer = keras.optimizers.RMSprop()
optimizer = mixed_precision.LossScaleOptimizer(optimizer, loss_scale="dynamic")
loss_object = tf.keras.losses.SparseCategoricalCrossentropy()
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).batch(32)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


losses = []
for _epoch in range(4):
    losses.append(sum(float(train_step(x, y)) for x, y in train_dataset))
print("loop learned", losses[-1] < losses[0], "iterations", int(optimizer.iterations))
print("Current loss scale: {:.1f}".format(optimizer.loss_scale))
