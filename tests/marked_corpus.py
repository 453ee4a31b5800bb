# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Corpora in which no token occurs twice, so that a token says where it was read."""

import json
from pathlib import Path

import haliax as hax
import jax
import numpy as np
from levanter.main.train_lm import TrainLmConfig
from levanter.schedule import BatchSchedule
from tokenizers import Tokenizer, models, pre_tokenizers

from levanter_marin.schedule.stages import Stage

END = "<end>"


def write_marked_corpus(folder: Path, sources: dict[str, int]) -> dict:
    """Writes a source of each name with so many tokens, numbered on through all; returns the `data` section."""
    total = sum(sources.values())
    vocabulary = {str(i): i for i in range(total)} | {END: total, "<unknown>": total + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    components, first = {}, 0
    for name, count in sources.items():
        text = " ".join(map(str, range(first, first + count)))
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        components[name] = {"source": {"type": "url", "train_urls": [str(folder / f"{name}.jsonl")]}}
        first += count
    return {
        "tokenizer": str(folder / "tokenizer"),
        "cache_dir": str(folder / "cache"),
        "components": components,
        "train_weights": dict.fromkeys(sources, 1.0),
        "mixture_block_size": 8,
    }


def tokens_of_steps(config: TrainLmConfig, stage: Stage, start: int, end: int) -> np.ndarray:
    """What the trainer of a stage reads in steps [start, end): [steps, tokens of a step]."""
    Pos = hax.Axis("position", config.train_seq_len)
    key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)[0]
    dataset = config.data.train_set(Pos, BatchSchedule(stage.batch), key=key).as_sync_dataset()
    examples = dataset.get_batch(list(range(start * stage.batch, end * stage.batch)))
    return np.stack([np.asarray(e.tokens.array) for e in examples]).reshape(end - start, stage.tokens_per_step)
