"""``import forebay.tensorflow``: ``forebay:///data/...`` wherever TensorFlow takes a path.

>>> import forebay.tensorflow
>>> tf.data.TFRecordDataset("forebay:///data/train-00000.tfrecord")

Files are read from local copies, which the file service makes when they are first asked for;
``tf.io.gfile`` lists the source. It is for reading: TensorFlow refuses the rest.
"""

from __future__ import annotations

import ctypes
import os

import tensorflow as tf

from . import _forebay
from ._internal import url


def plugin() -> str:
    """The path of the plugin: beside the extension module."""
    folder = os.path.dirname(os.path.abspath(_forebay.__file__))
    return os.path.join(folder, "libforebay_tensorflow.so")


def _register() -> None:
    tf.experimental.register_filesystem_plugin(plugin())
    # A preloaded library serves the plugin as it serves every other part of the program.
    if url.preloaded():
        return
    found = url.settings()
    if found is not None:
        start = ctypes.CDLL(plugin()).forebay_tensorflow_start
        start(*(os.fsencode(text) for text in found))


_register()
