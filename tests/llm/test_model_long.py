"""llm/model.py with every type of model that transformers has."""

import math

import torch
import transformers
from test_model import load, sees_the_future, tiny, train
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_every_causal_model_of_transformers(tmp_path):
    """Each type of model is trained, or is refused in one line. None sees its targets."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    trained, refused, untried, wrong = [], {}, {}, {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = tiny(kind)
        except Exception as error:  # its sizes have to fit together in a way of its own
            untried[kind] = str(error)
            continue
        try:
            model, _ = load(config, tmp_path)
            assert math.isfinite(train(model)), "the loss is not finite"
            assert not sees_the_future(model), "it sees its targets"
            with torch.device("meta"):  # as it is exported
                exported = AutoModelForCausalLM.from_config(model.config).state_dict()
            weights = model.state_dict()
            for name, tensor in exported.items():
                assert weights[name][tuple(map(slice, tensor.shape))].shape == tensor.shape, name
            trained.append(kind)
        except ValueError as error:
            refused[kind] = str(error)
            if "\n" in str(error):
                wrong[kind] = f"more than one line: {error}"
        except Exception as error:
            wrong[kind] = repr(error)
    print(f"\n{len(trained)} trained, {len(refused)} refused, {len(untried)} untried")
    print(*(f"{kind}: {why}" for kind, why in {**refused, **untried}.items()), sep="\n")
    assert not wrong
    total = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(trained) > 0.75 * total and len(untried) < 0.05 * total
