"""Short chat templates in the style of known models."""

from __future__ import annotations

QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- set thought = message.reasoning_content %}
        {%- if thought is string %}{{- '<think>\\n' + thought + '</think>' }}{%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
                {{- call.arguments if call.arguments is string else call.arguments | tojson }}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA_LIKE = """\
{{- bos_token }}
{%- set ns = namespace(seen=0) %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|h|>assistant<|/h|>{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|h|>ipython<|/h|>' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- '<|h|>' + message.role + '<|/h|>' + message.content + '<|eot|>' }}
    {%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if ns.seen > 100 %}{%- break %}{%- endif %}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- if add_generation_prompt %}{% generation %}{{- '<|h|>assistant<|/h|>' }}{% endgeneration %}{%- endif %}
"""

PARTS = (
    "{% for message in messages %}{{ message.role }}:"
    "{% for part in message['content'] %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}"
    "{% endfor %}"
)
