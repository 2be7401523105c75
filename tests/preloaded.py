"""What a real run imports: the process from which tests fork runs has imported it already."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # or a test of a name that does not exist waits for the network

import matplotlib.figure  # noqa: E402, F401
import pyarrow.parquet  # noqa: E402, F401
import tokenizers  # noqa: E402, F401
import torch.distributed.nn  # noqa: E402, F401
import torch.utils.flop_counter  # noqa: E402, F401
import transformers.integrations.sdpa_attention  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401
import transformers.models.gpt_neo.modeling_gpt_neo  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401
