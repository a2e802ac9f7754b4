"""Writes cases.json and tokenizer.json: chats as transformers' apply_chat_template renders them.

Run with Python 3.11, transformers 5.23.0, jinja2 3.1.6, tokenizers 0.23.3:

    python make.py
"""

import json
import pathlib

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ADDED = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# The blocks say what is learned: the answer and its end, without the line end behind it.
MARKED = """{% for message in messages %}
{% if message.role == "assistant" %}
{{- '<|im_start|>assistant\\n' }}
{%- generation -%}
    {{ message.content | trim }}<|im_end|>
{%- endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{#- The first message may be that of the system. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" + "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# What Python prints, and methods of its strings, lists and tables.
PYTHON = """{%- macro line(name, value=none) -%}
{{ name.title() }}={{ value }}{{ "\\n" }}
{%- endmacro -%}
{%- for message in messages %}
{%- for name, value in message.items() %}
{{- line(name, value) }}
{%- endfor %}
{%- if message.get('skip', false) %}{% continue %}{% endif %}
{{- message.content.replace('a', 'A').upper().split(' ') | join('|') }} {{ message.get('weight') }} {{ none ~ true }}
{{ message.content | string | length }} {{ [1, 'a', none, 2.5] }} {{ {'k': [true]} }}
{{ message | tojson(sort_keys=true, separators=(',', ':')) }}
{%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place, <b>now</b> & \"here\".",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1.0}},
                "required": ["place"],
            },
        },
    }
]

TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Größe von 模型? "},
    {"role": "assistant", "content": "  Groß: 5 < 6 & 'so'.\n"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It is."},
]

CALLS = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 1e20}}}
        ],
    },
    {"role": "tool", "name": "weather", "content": "rain, 1.5e-07 mm"},
    {"role": "assistant", "content": "<think>\nIt rains.\n</think>\n\nRain."},
]

ODD = [
    {"role": "user", "content": "a banana", "weight": None, "flag": True, "n": 3, "x": 1e16, "list": ["a", 1.0]},
    {"role": "assistant", "content": "it's 'a' \"b\"", "skip": True},
    {"role": "user", "content": "last \\ one"},
]

CASES = [
    ("chatml", CHATML, TALK, None, {}),
    ("marked", MARKED, TALK, None, {}),
    ("llama3", LLAMA3, TALK, None, {"date_string": "26 Jul 2024"}),
    ("llama3 with tools", LLAMA3, CALLS, TOOLS, {"date_string": "26 Jul 2024"}),
    ("mistral", MISTRAL, TALK[1:], None, {}),
    ("mistral out of order", MISTRAL, TALK, None, {}),
    ("qwen", QWEN, TALK, None, {"enable_thinking": False}),
    ("qwen with tools", QWEN, CALLS, TOOLS, {}),
    ("qwen with reasoning", QWEN, [TALK[1], {"role": "assistant", "reasoning": "hm", "content": "ok"}], None, {}),
    ("python", PYTHON, ODD, None, {}),
]


def tokenizer():
    """Byte-level pieces with a few merges, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate(ADDED + letters)}
    merges = [("o", "f"), ("I", "t"), ("i", "s"), ("Ġ", "is"), ("Ċ", "Ċ")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    pieces = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=pieces, **SPECIAL)


def rendered(pieces, case, prompts):
    _, template, messages, tools, kwargs = case
    try:
        return pieces.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompts, **kwargs
        )
    except Exception as error:
        return {"error": str(error)}


def tokens(pieces, case):
    """The ids, and the mask of the answers where the template marks them."""
    _, template, messages, tools, kwargs = case
    marked = template is MARKED
    found = pieces.apply_chat_template(
        messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=marked, **kwargs
    )
    return found["input_ids"], found.get("assistant_masks")


def main():
    pieces = tokenizer()
    cases = []
    for case in CASES:
        name, template, messages, tools, kwargs = case
        text, prompt = rendered(pieces, case, False), rendered(pieces, case, True)
        ids, mask = (None, None) if isinstance(text, dict) else tokens(pieces, case)
        cases.append(
            {
                "name": name,
                "template": template,
                "special_tokens": SPECIAL,
                "messages": messages,
                "tools": tools,
                "kwargs": kwargs,
                "text": text,
                "prompt": prompt,
                "ids": ids,
                "mask": mask,
            }
        )
    (HERE / "cases.json").write_text(json.dumps({"cases": cases}, ensure_ascii=False, indent=1) + "\n")
    pieces.backend_tokenizer.save(str(HERE / "tokenizer.json"))


if __name__ == "__main__":
    main()
