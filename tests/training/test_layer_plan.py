"""Which layers are trained, and from when on."""

from __future__ import annotations

import pytest
from torch import nn

from ddp_runner.core.settings import OptimSettings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.layer_plan import layer_plan

GROUPS = {"encoder": ["embed", "blocks.*"], "head": "head"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)


def planned(model=None, total_steps=100, **settings):
    model = model or Model()
    plan = layer_plan(model, OptimSettings(**settings), groups=GROUPS, total_steps=total_steps)
    plan.begin(model)
    return model, plan


def trained(model):
    return {name for name, one in model.named_parameters() if one.requires_grad}


def test_without_a_word_all_is_as_the_task_made_it():
    model = Model()
    model.embed.requires_grad_(False)
    before = trained(model)
    _, plan = planned(model)
    assert trained(model) == before
    assert plan.later_names() == frozenset()
    assert plan.unfreeze(model, step=1000) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("head", {"head.weight", "head.bias"}),
        ("head, blocks.1", {"head.weight", "head.bias", "blocks.1.weight", "blocks.1.bias"}),
        ("*.bias", {"head.bias", "blocks.0.bias", "blocks.1.bias"}),
        ("embed.weight", {"embed.weight"}),
    ],
)
def test_groups_and_patterns_choose_what_is_trained(words, expected):
    assert trained(planned(train_layers=words)[0]) == expected


def test_layers_are_unfrozen_at_their_steps_and_stay_so():
    """Also where a rank comes late: what was due before is due."""
    model, plan = planned(train_layers="head", unfreeze="blocks.1@10,encoder@0.5")
    assert plan.unfreeze(model, step=9) == ""
    assert "blocks.1 trained from step 10 on: 20 of 44 parameters" in plan.unfreeze(model, step=10)
    assert plan.unfreeze(model, step=11) == ""
    assert plan.unfreeze(model, step=50).startswith("encoder trained from step 50")
    assert trained(model) == {name for name, _ in model.named_parameters()}
    late, plan = planned(train_layers="head", unfreeze="blocks.1@10,encoder@0.5")
    plan.unfreeze(late, step=70)
    assert trained(late) == trained(model)
    assert plan.later_names() == {name for name, _ in model.named_parameters()} - {
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train_layers": "haed"}, "train_layers=haed: matches no parameter of the model; the nearest names are head"),
        ({"train_layers": ","}, "names nothing"),
        ({"unfreeze": "encoder"}, "optim.unfreeze=encoder: must be LAYERS@STEP or LAYERS@SHARE"),
        ({"unfreeze": "encoder@0"}, "must be LAYERS@STEP"),
        ({"unfreeze": "encoder@1.5"}, "must be LAYERS@STEP"),
        ({"unfreeze": "block@3"}, "nearest names are blocks"),
    ],
)  # fmt: skip
def test_what_names_no_layer_is_one_line(settings, says):
    with pytest.raises(BadInputError) as raised:
        planned(**settings)
    assert says in str(raised.value)
