"""Steps of people's trainers over any split of the batch, right and wrong: notes/how-to/trainers.md.

A step is the user's: a function of the model and of a list of micro-batches.
"""

import re
from functools import partial

import accelerate
import datasets
import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
import trl
from torch.utils.data import DataLoader
from trainings import of_page

import diffcoll as dc
from diffcoll.testing import GradientMismatchError, assert_matches_single_process

RATE = 0.1


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(loss_type=None, kind="GPT2"):
    torch.manual_seed(0)
    none = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=11, n_positions=6, n_embd=8, n_layer=1, n_head=2, **none)
    model = getattr(transformers, f"{kind}LMHeadModel")(config)
    assert model.loss_type is None
    if loss_type is not None:
        model.loss_type = loss_type
    return model


def xlnet():
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=11, d_model=8, n_layer=1, n_head=2, d_inner=12, dropout=0.0)
    return transformers.XLNetLMHeadModel(config)


def texts():
    ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([6, 3, 5, 2, 4, 6, 2, 5])[:, None] > torch.arange(6)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.where(kept, ids, -100)}


def one_process(model, parts):
    (part,) = parts
    model(**part).loss.backward()
    torch.optim.SGD(model.parameters(), RATE).step()


OPTIONS = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
OPTIONS |= {
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 1,
}


def nll(model, part):
    logits = model(input_ids=part["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.mT, part["labels"][:, 1:], reduction="sum")


def tokens(*parts):
    return torch.tensor(sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts), dtype=torch.double)


# ── trainers: each takes what the sum over a micro-batch's tokens is divided by ──────────────────────────


def by_all(parts):
    total = dc.all_reduce(tokens(*parts))
    return [total / dc.get_world_size() for _ in parts]


def by_own(parts):
    return [tokens(*parts) for _ in parts]


def by_micro_batch(parts):
    return [tokens(part) * len(parts) for part in parts]


class Parts(transformers.Trainer):
    """As a mixin with TRL's trainers, too."""

    def __init__(self, model, arguments, parts, **more):
        super().__init__(model, arguments, **more)
        self.parts = parts

    def get_train_dataloader(self):
        return self.parts


def hugging_face(model, parts, func=None, **options):
    arguments = transformers.TrainingArguments("unused", gradient_accumulation_steps=len(parts), **OPTIONS, **options)
    Parts(model, arguments, parts, compute_loss_func=func and of_page("trainer.md", func)).train()


class SFT(Parts, trl.SFTTrainer):
    pass


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {**{str(i): i for i in range(10)}, "<eos>": 10}
    kept = Tokenizer(models.WordLevel(words, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=kept, eos_token="<eos>", pad_token="<eos>")


def sft(model, parts, **options):
    more = {"dataset_kwargs": {"skip_prepare_dataset": True}, "bf16": False}
    arguments = trl.SFTConfig("unused", gradient_accumulation_steps=len(parts), **OPTIONS, **more, **options)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    SFT(model, arguments, parts, train_dataset=rows, processing_class=tokenizer()).train()


def accelerated(divisors, model, parts):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=len(parts))
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
    for divisor, part in zip(divisors(parts), parts, strict=True):
        with accelerator.accumulate(wrapped):
            accelerator.backward(nll(wrapped, part) * len(parts) / divisor)
            optimizer.step()
            optimizer.zero_grad()


class Module(pl.LightningModule):
    def __init__(self, model, parts, divisors):
        super().__init__()
        self.model, self.parts, self.divisors = model, parts, divisors

    def training_step(self, part, k):
        return nll(self.model, part) * len(self.parts) / self.divisors[k]

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), RATE)

    def train_dataloader(self):
        return DataLoader(self.parts, batch_size=None)


def lightning(divisors, model, parts):
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    more = {"accelerator": "cpu", "devices": dc.get_world_size(), "strategy": "ddp", "use_distributed_sampler": False}
    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=len(parts), **quiet, **more)
    trainer.fit(Module(model, parts, divisors(parts)))


def check(step, module, splits):
    return assert_matches_single_process(
        step, one_process, texts(), module=module, ranks=splits, on=["gloo"], timeout=100
    )


UNEVEN, EVEN, EQUAL = [((2, 2), (4,)), ((1, 3), (3, 1))], [((1, 3), (3, 1))], [((2, 2), (2, 2))]
RIGHT = {
    "the HF Trainer": (hugging_face, llama, UNEVEN),
    "the HF Trainer, GPT-2 with a loss_type": (hugging_face, partial(gpt2, "ForCausalLM"), UNEVEN),
    "the HF Trainer, OpenAI GPT with a loss_type": (hugging_face, partial(gpt2, "ForCausalLM", "OpenAIGPT"), UNEVEN),
    "the HF Trainer, CTRL with a loss_type": (hugging_face, partial(gpt2, "ForCausalLM", "CTRL"), UNEVEN),
    "the HF Trainer, a function of next tokens": (partial(hugging_face, func="mean_over_next_tokens"), llama, UNEVEN),
    "TRL's SFTTrainer": (sft, llama, EQUAL),
    "Accelerate": (partial(accelerated, by_all), llama, UNEVEN),
    "Lightning": (partial(lightning, by_all), llama, EVEN),
}
OF_RANK = r"other than −100 of labels but their first column, on each rank\); one process .* first column\)"
WRONG = {
    "the HF Trainer, GPT-2": (hugging_face, gpt2, UNEVEN, r"over the total of labels other than −100 of labels\)"),
    "the HF Trainer, OpenAI GPT": (hugging_face, partial(gpt2, None, "OpenAIGPT"), UNEVEN, r"over the total of labels"),
    "the HF Trainer, CTRL": (hugging_face, partial(gpt2, None, "CTRL"), UNEVEN, r"over the total of labels"),
    "the HF Trainer, XLNet": (hugging_face, xlnet, UNEVEN, r"a sum"),
    "the HF Trainer, tokens of this rank": (
        partial(hugging_face, average_tokens_across_devices=False),
        llama,
        UNEVEN,
        OF_RANK,
    ),
    "TRL's SFTTrainer, tokens of this rank": (partial(sft, average_tokens_across_devices=False), llama, EQUAL, OF_RANK),
    "Accelerate, tokens of this rank": (partial(accelerated, by_own), llama, UNEVEN, OF_RANK),
    "Accelerate, mean of means": (partial(accelerated, by_micro_batch), llama, UNEVEN, r"\(equally( on each rank)?\)"),
    "Lightning, tokens of this rank": (partial(lightning, by_own), llama, EVEN, OF_RANK),
    "Lightning, mean of means": (partial(lightning, by_micro_batch), llama, EVEN, r"\(equally( on each rank)?\)"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    step, module, splits = RIGHT[name]
    assert not check(step, module(), splits).observed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_denominator_is_named(name):
    step, module, splits, words = WRONG[name]
    with pytest.raises(GradientMismatchError) as error:
        check(step, module(), splits)
    found = " ".join(" ".join(error.value.report.observed).split())
    assert re.search(words, found), found


def test_simulated_ranks_that_share_the_state_of_accelerate(monkeypatch):
    """Wrong, for no fault of the step: an error, and no verdict."""
    for each in (accelerate.state.PartialState, accelerate.state.AcceleratorState, accelerate.state.GradientState):
        monkeypatch.setattr(each, "_shared_state", {})
    step, (module, splits) = partial(accelerated, by_all), (llama(), UNEVEN)
    more = {"module": module, "ranks": splits, "on": ["simulated"]}
    with pytest.raises(ValueError, match="accelerate"):
        assert_matches_single_process(step, one_process, texts(), **more)
    for each in (accelerate.state.PartialState, accelerate.state.AcceleratorState, accelerate.state.GradientState):
        monkeypatch.setattr(each, "_shared_state", accelerate.state.ThreadLocalSharedDict())
    assert assert_matches_single_process(step, one_process, texts(), **more).ok
