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

# Kinds of branches in real templates, each with the forms that it takes for user, assistant and system: "text",
# "both" (text, and parts), "parts" (parts only), "part" (one part only).
_TURN = "{{- '<' + message.role + '>' }}"
_BOTH = (
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}"
)
BRANCHES: dict[str, tuple[str, tuple[str, str, str]]] = {
    # the system's content is printed, the others are looped over; the results of calls are looked for ahead
    "system printed": (
        """\
{%- macro shown(content) %}{%- if content is string %}{{- content | trim }}{%- else %}
    {%- for part in content %}{%- if part.type == 'text' %}{{- part.text | trim }}{%- endif %}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- set start = namespace(at=0, open=false) %}
{%- if messages[0].role in ['system', 'developer'] %}{{- '<sys>' + messages[0].content | string }}
    {%- set start.at = 1 %}{%- endif %}
{%- for message in messages[start.at:] %}
    {%- if message.role != 'tool' %}
        {{- '<' + message.role + '>' + shown(message.content) }}
        {%- if message.tool_calls %}
            {%- set found = namespace(answers=[], over=false) %}
            {%- for later in messages[start.at + loop.index:] %}
                {%- if later.role != 'tool' %}{%- set found.over = true %}{%- endif %}
                {%- if not found.over %}{%- set found.answers = found.answers + [later] %}{%- endif %}
            {%- endfor %}
            {%- for answer in found.answers %}{{- '<answer>' + answer.content | string }}{%- endfor %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
""",
        ("both", "both", "text"),
    ),
    # a tool's answer that is a text is one result, anything else is a list of results
    "results in a list": (
        """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<observed>' }}{%- endif %}
        {%- if message.content is string %}{{- '<result>' + message.content }}{%- else %}
            {%- for one in message.content %}
                {{- '<observed><result>' + (one.output if one.output is defined else one) | string }}
            {%- endfor %}
        {%- endif %}
    {%- else %}"""
        + _TURN
        + _BOTH
        + "{%- endif %}{%- endfor %}",
        ("both", "both", "both"),
    ),
    # all contents by a test of their type, but the first part alone of the system's and the assistant's
    "first part": (
        """\
{%- for message in messages %}"""
        + _TURN
        + "{%- if message.role == 'user' %}"
        + _BOTH
        + """\
    {%- elif message.role == 'tool' %}{{- '[' + message.content + ']' }}
    {%- elif message.content is string %}{{- message.content }}{%- else %}{{- message.content[0].text }}{%- endif %}
{%- endfor %}
""",
        ("both", "text", "text"),
    ),
    # an answer is concatenated, an empty content makes no line, a content is collected in a namespace
    "concatenated": (
        """\
{%- for message in messages %}
    {%- set ns = namespace(text='') %}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' + message.content }}
    {%- else %}
        {%- if message.content is string %}{%- set ns.text = message.content %}{%- else %}
            {%- for part in message.content %}{%- set ns.text = ns.text + part['text'] %}{%- endfor %}{%- endif %}
        {{- '<' + message.role + '>' + ns.text }}{%- if ns.text %}{{- '\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
""",
        ("both", "both", "both"),
    ),
    # an answer is looked over for parts, but printed beside calls; the last user's content beside tools is printed too
    "printed beside calls": (
        """\
{%- for message in messages %}
    {%- if message.tool_calls %}{{- '<calling>' ~ message.content }}
    {%- elif tools and loop.last and message.role == 'user' %}{{- '<last>' ~ message.content }}
    {%- else %}"""
        + _TURN
        + _BOTH
        + "{%- endif %}{%- endfor %}",
        ("text", "text", "both"),
    ),
    # a list that is no text is printed as JSON
    "json": (
        "{%- for message in messages %}"
        + _TURN
        + "{{- message.content if message.content is string else message.content | tojson }}{%- endfor %}",
        ("text", "text", "text"),
    ),
    # users' contents are lists, the others' are texts
    "user in parts": (
        "{%- for message in messages %}"
        + _TURN
        + "{%- if message.role == 'user' %}{%- for part in message.content %}{{- part['text'] }}{%- endfor %}"
        "{%- else %}{{- message.content + '.' }}{%- endif %}{%- endfor %}",
        ("parts", "text", "text"),
    ),
    # users' contents are one part
    "user in one part": (
        "{%- for message in messages %}{%- if message.role == 'user' %}"
        "{%- if message.content is string %}{{- raise_exception('a list, please') }}{%- endif %}"
        "{{- message.content[0].text }}{%- else %}{{- message.content + '.' }}{%- endif %}{%- endfor %}",
        ("part", "text", "text"),
    ),
    # the system's content only shows where there are tools; other systems are refused
    "system beside tools": (
        """\
{%- if messages[0].role == 'system' %}
    {%- if not tools %}{{- raise_exception('no system without tools') }}{%- endif %}
    {{- tools | tojson }}
    {%- if messages[0].content is string %}{{- messages[0].content }}{%- else %}
        {%- for part in messages[0].content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endif %}
{%- for message in messages if message.role != 'system' %}{{- message.content }}{%- endfor %}
""",
        ("text", "text", "both"),
    ),
    "no system": (
        "{%- for message in messages %}"
        "{%- if message.role == 'system' %}{{- raise_exception('no system') }}{%- endif %}"
        + _TURN
        + _BOTH
        + "{%- endfor %}",
        ("both", "both", "text"),
    ),
}
