"""Trains a random model of some size for a few steps: predicted and measured memory and time beside each other.

python -m scripts.train_memory 160M --sets bias --steps 20
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from llama_adapter.app.models.random_model import VOCABULARY, WiderTokenizer, decoder_config, parse_size, vision_config
from llama_adapter.app.training.batches import Microbatch
from llama_adapter.app.training.choice import TrainingChoice
from llama_adapter.app.training.distributing import Distributed
from llama_adapter.app.training.model import TrainableModel
from llama_adapter.app.training.optimiser import NamedAdamW
from llama_adapter.app.training.plan import Shapes, plan_step
from llama_adapter.app.training.ranks import OneRank
from llama_adapter.app.training.sources import TrainingSources, _new_adapter
from llama_adapter.app.training.stepping import Stepper
from llama_adapter.llm.weights.names import LlamaSource, SplitTensor, llama_shapes
from llama_adapter.runtime.ceilings import measure_bandwidth, measure_matmul
from llama_adapter.runtime.devices import DTYPES, open_backend
from llama_adapter.vision.encoder import ClipVisionTower
from llama_adapter.vision.weights import ClipSource
