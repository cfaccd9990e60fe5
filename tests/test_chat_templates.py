"""Prompts by chat templates: the tokens of `transformers`' own call, variables of the template, and whole chats."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from made import task as task_of
from small import small_model
from test_jsonl_task import write
from tiny_hf import CHAT_TEMPLATE, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from grpo_cli.model.load import eos_token_ids
from grpo_cli.support.errors import UserError
from grpo_cli.tasks.demonstrations import conversations, reply_tokens
from grpo_cli.tasks.jsonl import Jsonl
from grpo_cli.tasks.prompting import Prompting, encode_behind, turn_end

# As the published ones of the presets behave, in few words.
THINKS = (  # Qwen3
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% generation %}{{ m.content.split('</think>')[-1].strip('\n') }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EMPTY = "<think>\n\n</think>\n\n"
CHAT = [
    {"role": "system", "content": "Think."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
    {"role": "user", "content": "and 2+2?"},
]


def asks(folder: Path, *questions: Any) -> str:
    return write(folder / "p.jsonl", *({"question": question, "answer": "1"} for question in questions))


def made(path: str, template: str | bool = THINKS, words: Any = None, **settings: Any) -> Jsonl:
    return task_of("jsonl", make_tokenizer(chat_template=template), path=path, chat_template_kwargs=words, **settings)


def prompts(task: Jsonl) -> list[str]:
    both = [*task.prompts("train"), *task.prompts("eval")]
    return [task._prompting.tokenizer.decode(list(p.token_ids)) for p in sorted(both, key=lambda p: p.id.split("-")[1])]


def published(name: str) -> str:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("the published chat templates lie in the package trl (the extra bench), which is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (True, {}),
        ("{{ date }}" + CHAT_TEMPLATE, {"date": "1 May"}),
        (THINKS, {"enable_thinking": False}),
        ("of qwen3", {"enable_thinking": False}),
        *((f"of {name}", {}) for name in ("qwen2_5", "qwen3", "llama3_1", "llama3_2")),
    ],
)
def test_tokens_are_those_of_transformers_own_call(tmp_path: Path, template: str | bool, words: dict[str, Any]) -> None:
    questions = ["What is 1?", [*CHAT[1:2]], CHAT, CHAT[:2]]
    template = published(template[3:]) if str(template).startswith("of ") else template
    task = made(asks(tmp_path, *questions), template, words)
    for prompt in (*task.prompts("train"), *task.prompts("eval")):
        question = questions[int(prompt.id.split("-")[1]) - 1]
        chat = question if isinstance(question, list) else [{"role": "user", "content": question}]
        theirs = task._prompting.tokenizer.apply_chat_template
        assert list(prompt.token_ids) == theirs(chat, add_generation_prompt=True, return_dict=False, **words)


def test_a_word_of_the_template_reaches_it_where_it_is_used(tmp_path: Path) -> None:
    path, words = asks(tmp_path, "a", "b"), {"enable_thinking": False}
    assert all(text.endswith(EMPTY) for text in prompts(made(path, words=words)))
    assert not any(EMPTY in text for text in prompts(made(path, words=words, use_chat_template=False)))
    for template, word, named in ((THINKS, "enable_thinkin", "did you mean"), (True, "x", "is not read by")):
        with pytest.raises(UserError, match=f"model.chat_template_kwargs.*{named}"):
            made(path, template, {word: False})


def test_the_empty_place_for_reasoning_that_a_template_drops_is_named_and_kept_by_the_setting(tmp_path: Path) -> None:
    """With enable_thinking=false a turn is drawn behind an empty block, and earlier turns have none."""
    words: Any = {"turns": 2, "environment": "environments:Responding", "words": {"enable_thinking": False}}
    with pytest.raises(UserError, match="task.keep_reasoning=true"):
        made(asks(tmp_path, "a", "b"), **words)
    task = made(asks(tmp_path, "a", "b"), keep_reasoning=True, **words)
    prompt, turn = task.prompts("train")[0], task._prompting.tokenizer.encode("2<|im_end|>", add_special_tokens=False)
    read = task.raw_text([*prompt.token_ids, *turn, *task.between([turn], ["No."])])
    begun = f"<|im_start|>assistant\n{EMPTY}"
    assert read.endswith(f"{begun}2<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n{begun}")


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x"


@pytest.mark.parametrize(
    ("question", "settings", "named"),
    [
        (CHAT, {"system_prompt": "x"}, "line 1: .*task.system_prompt=null"),
        (CHAT, {"use_chat_template": False}, "a chat template"),
        (CHAT, {"template": NO_SYSTEM}, "line 1: .*no system"),
        (CHAT[:3], {}, "line 1: field 'question' ends with an assistant message"),
        ([], {}, "holds nothing"),
        ([{"role": "user", "content": ["x"]}], {}, "each with a role and a content"),
    ],
)
def test_a_chat_that_cannot_be_put_is_refused_at_once(tmp_path: Path, question: Any, settings: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        made(asks(tmp_path, question, "b", "c"), **settings)


def test_a_field_of_a_field_is_read_unless_there_is_one_of_that_very_name(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "reward_model": {"truth": i}} for i in range(3)]
    path = write(tmp_path / "p.jsonl", *rows, {**rows[0], "reward_model.truth": 9})
    task = made(path, question_field="prompt", answer_field="reward_model.truth", few_shot=0)
    assert {p.answer for split in ("train", "eval") for p in task.prompts(split)} == {"0", "1", "2", "9"}


def test_tags_that_are_special_tokens_are_read_and_the_end_is_not(tmp_path: Path) -> None:
    tokenizer, tags = make_tokenizer(chat_template=True), ["</think>", "[THINK]", "<answer>"]
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|eom_id|>", *tags]})
    task = task_of("jsonl", tokenizer, path=asks(tmp_path, "a", "b"))
    for tag in tags:
        for end in ("", "<|im_end|>", "<|endoftext|>", "<|eom_id|>"):
            ids = tokenizer.encode(f"{tag}7{tag}{end}", add_special_tokens=False)
            assert task.text(ids) == f"{tag}7{tag}" and task.raw_text(ids) == f"{tag}7{tag}{end}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT_TEMPLATE, "<|im_end|>"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "<|im_start|>"),
        ("{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (False, None),
    ],
)
def test_the_end_of_a_turn_ends_a_completion(template: str | bool, end: str | None) -> None:
    """Whatever the tokenizer and the generation config name."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.eos_token, model = "<|endoftext|>", small_model()
    model.generation_config.eos_token_id = None
    ids = [tokenizer.convert_tokens_to_ids(token) for token in dict.fromkeys(("<|endoftext|>", end)) if token]
    turn = turn_end(tokenizer)[1]
    assert turn == (None if end is None else ids[-1]) and eos_token_ids(model, tokenizer, (), turn) == (*ids,)
    assert eos_token_ids(model, tokenizer, ("4",)) == (*tokenizer.encode("4"),)


NO_HEADER, HEADER = CHAT_TEMPLATE.partition("{% if add")[0], "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
VICUNA = "{% for m in messages %}{{ 'U: ' if m.role == 'user' else 'A: ' }}{{ m.content }}{{ eos_token }}{% endfor %}"
ENDED = CHAT_TEMPLATE + "{{ eos_token }}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [(NO_HEADER, HEADER), (VICUNA, "U: 1?<|im_end|>A:"), (ENDED, HEADER), (False, "Question: 1?\nAnswer:")],
)
def test_a_prompt_ends_with_the_header_of_the_reply_and_without_an_end(
    template: str | bool, expected: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(chat_template=template)
    special = [("<|im_end|>", 3), ("<|begin|>", 4)]
    ends = processors.TemplateProcessing(single="<|begin|> $A <|im_end|> <|im_end|>", special_tokens=special)
    tokenizer._tokenizer.post_processor = ends
    task = task_of("jsonl", tokenizer, path=asks(tmp_path, "1?", "2?"), template="Question: {question}\nAnswer:")
    (prompt,) = task.prompts("train")
    assert task.raw_text(prompt.token_ids).removeprefix("<|begin|>").replace("2?", "1?") == expected


def test_a_template_that_reads_the_clock_reads_the_same_moment_always(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}" + CHAT_TEMPLATE
    first = prompts(made(asks(tmp_path, "a", "b"), template))[0]
    assert first.startswith("26 Jul 2024 00:00:00.000000<|im_start|>")


@pytest.mark.parametrize("template", ["{{ 'x' * 20000000 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
def test_a_template_that_fails_or_makes_too_much_text_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chat template"):
        made(asks(tmp_path, "a", "b"), template)


def sentence_pieces(scheme: str, template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before what begins a text: by its normaliser, or as `scheme` says."""
    found = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if scheme == "normaliser":
        found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        found.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    else:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = ["The answer is 12. What is 3 + 4? Try again, [INST] it is wrong. [/INST] user assistant Q: A:"] * 9
    found.train_from_iterator(text, trainers.BpeTrainer(special_tokens=special, vocab_size=500, show_progress=False))
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


LLAMA2 = (
    "{% for m in messages %}{{ '<s>[INST] ' + m.content | trim + ' [/INST]' if m.role == 'user' else "
    "' ' + m.content | trim + ' </s>' }}{% endfor %}"
)
ON_SP = CHAT_TEMPLATE.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")


@pytest.mark.parametrize(
    ("scheme", "template"), [("always", LLAMA2), ("first", ON_SP), ("never", LLAMA2), ("normaliser", ON_SP)]
)
def test_texts_that_are_joined_have_the_tokens_of_the_whole_text(scheme: str, template: str, tmp_path: Path) -> None:
    tokenizer = sentence_pieces(scheme, template)
    Prompting(tokenizer, use_chat_template=True).check_turns("user", keep_reasoning=template == ON_SP)
    talk = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "\nThe answer is 12. "},
        {"role": "user", "content": "Try again, it is wrong."},
        {"role": "assistant", "content": "7"},
    ]
    whole = tokenizer.encode(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False)
    (shown,) = conversations(write(tmp_path / "talk.jsonl", {"messages": talk}), tokenizer, {}, 2)
    found = [*shown.request.prompt.token_ids, *shown.token_ids]
    assert found == whole[: len(found)] and len(whole) - len(found) <= 2  # a line break
    chat = Prompting(tokenizer, "Q: {question} A:", None, True)
    prompt, turn = chat.encode(talk[0]["content"]), list(shown.turns[0])
    assert [*prompt, *turn, *chat.between(turn, [talk[2]["content"]], "user")] == found[: -len(shown.turns[1])]
    plain = Prompting(tokenizer, "Q: {question} A:", None, False)
    prompt = plain.encode("What is 3 + 4?")
    worked = reply_tokens(replace(shown.request.prompt, token_ids=tuple(prompt)), "The answer is 12.", tokenizer)
    assert [*prompt, *worked] == tokenizer("Q: What is 3 + 4? A: The answer is 12.")["input_ids"]
    assert [encode_behind(tokenizer, "</s>", prompt, special=word) == [2] for word in (True, False)] == [True, False]
