"""Baichuan2 (7B and 13B) for Transformers 5: loads the official folders as downloaded, and runs no code from them."""

import os

import torch

if not torch.cuda.is_available():  # transformers brings DeepSpeed, which otherwise says what it found at every start
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

from pardemo.baichuan2.checkpoints import load_checkpoint, read_config, save_checkpoint
from pardemo.baichuan2.configuration import Baichuan2Config
from pardemo.baichuan2.modeling import Baichuan2ForCausalLM, Baichuan2Model
from pardemo.baichuan2.tokenization import Baichuan2Tokenizer, load_tokenizer

AutoConfig.register("baichuan", Baichuan2Config, exist_ok=True)
AutoModel.register(Baichuan2Config, Baichuan2Model, exist_ok=True)
AutoModelForCausalLM.register(Baichuan2Config, Baichuan2ForCausalLM, exist_ok=True)
# by its name pipelines, the Trainer's label smoothing and Transformers' own tests know what predicts the next token
MODEL_MAPPING_NAMES["baichuan"] = Baichuan2Model.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["baichuan"] = Baichuan2ForCausalLM.__name__
AutoTokenizer.register(Baichuan2Config, slow_tokenizer_class=Baichuan2Tokenizer, exist_ok=True)
# the official folders name their tokenizer so; unknown names would become a generic one without a word
REGISTERED_TOKENIZER_CLASSES["BaichuanTokenizer"] = Baichuan2Tokenizer

__all__ = [
    "Baichuan2Config",
    "Baichuan2ForCausalLM",
    "Baichuan2Model",
    "Baichuan2Tokenizer",
    "load_checkpoint",
    "load_tokenizer",
    "read_config",
    "save_checkpoint",
]
