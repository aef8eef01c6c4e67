"""Makes the body of a chat into the request that the engine takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from fastapi import Request

from fastgen.errors import InvalidArgumentError
from fastgen.runtime.requests.outputs import GenerationOutput
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.text.codec import TextCodec
from fastgen.runtime.text.prompts import TemplateOptions
from fastgen.serving.answers import TextRules
from fastgen.serving.http.openai.formats import format_field
from fastgen.serving.http.openai.messages import Message, for_template
from fastgen.serving.http.openai.requests import ChatRequest
from fastgen.serving.http.openai.run import Batch, check_prompt, code_of
from fastgen.serving.http.openai.sampling import chat_sampling
from fastgen.serving.http.openai.text_rules import num_kept, text_rules, with_special_stops
from fastgen.serving.http.openai.tools import ChatTools, chat_tools, until_first_call
from fastgen.serving.http.openai.tools import for_template as tools_for_template
from fastgen.serving.http.openai.vllm import VllmChatFields
from fastgen.serving.isolated import texts
from fastgen.serving.refusals import BadRequestError
from fastgen.serving.service import Service
from fastgen.serving.tools.formats import ToolFormat


@dataclass(frozen=True)
class PreparedChat:
    """A chat, ready for the engine."""

    prompt_ids: list[int]
    sampling: SamplingParams
    rules: TextRules
    # The tools that the answer may call.
    tools: ChatTools | None
    # The field that gives the answer's format, if it has one.
    format_field: str
    # The name of the conversation that it belongs to, if the client gave one.
    session: str | None

    @classmethod
    async def of(cls, service: Service, body: ChatRequest, tool_format: ToolFormat | None) -> Self:
        """Renders, encodes and checks ``body``. Raises ``BadRequestError``."""
        codec, facts = service.codec, service.facts
        tools, response_format = chat_tools(body, codec, tool_format)
        num_answer = body.max_completion_tokens or body.max_tokens or 1
        prompt_ids = await encode_chat(
            service,
            body.messages,
            None if body.tool_choice == "none" else tools_for_template(body.tools),
            body,
            add_special_tokens=bool(body.add_special_tokens),
            keep=num_kept(body, num_answer, facts.max_model_len),
        )
        sampling = chat_sampling(
            body,
            len(prompt_ids),
            response_format,
            defaults=codec.default_sampling,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
        )
        rules = text_rules(body, codec, {} if tools is None else tools.spelled)
        if tools is not None and not tools.is_parallel:
            rules = replace(rules, reports_each_token=True)  # so that the answer ends with the token that ends the call
        sampling = with_special_stops(body, sampling, codec)
        return cls(prompt_ids, sampling, rules, tools, format_field(body) or "tools", body.prompt_cache_key)

    async def submit(self, service: Service, request: Request, *, is_stream: bool) -> Batch:
        """Queues it. Raises ``RefusedError``."""
        return await Batch.submit(
            service,
            request,
            [self.prompt_ids],
            [self.sampling],
            is_stream=is_stream,
            rules=self.rules,
            session=self.session,
        )

    def until_first_call(self, output: GenerationOutput, codec: TextCodec) -> GenerationOutput:
        """Returns ``output`` as far as a stream sends it: up to the end of its first call, if it may have one only."""
        if self.tools is None or self.tools.is_parallel:
            return output
        first, *others = (
            until_first_call(
                completion,
                self.tools,
                codec.new_detokenizer(
                    self.prompt_ids, self.sampling, self.rules.spelled, includes_stop=self.rules.includes_stop
                ),
            )
            for completion in output.completions
        )
        return replace(first, others=tuple(others))


async def encode_chat(
    service: Service,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    fields: VllmChatFields,
    *,
    add_special_tokens: bool = False,
    keep: int | None = None,
) -> list[int]:
    """Returns the token ids of a conversation, the last ``keep`` of them. Rendering and encoding run on other threads,
    because both may take long. ``fields`` say how it is rendered.

    Raises ``BadRequestError`` if the template refuses the conversation or it leaves no room for an answer, and
    ``OverloadedError`` if too many conversations wait. A call that is cancelled while it waits gives up its place.
    """
    codec = service.codec
    template = codec.chat_template(has_tools=tools is not None)
    plain = for_template(messages, has_developer_role="developer" in template)
    options = _template_options(fields, template, add_special_tokens=add_special_tokens)
    try:
        prompt_ids = await texts.encode_chat(codec, plain, tools, options)
    except InvalidArgumentError as error:
        raise BadRequestError(f"messages: {error}"[:2000], param="messages", code=code_of(error)) from error
    if keep is not None:
        prompt_ids = prompt_ids[-keep:]
    check_prompt(service, prompt_ids, "messages")
    return prompt_ids


def _template_options(fields: VllmChatFields, template: str, *, add_special_tokens: bool) -> TemplateOptions:
    """Returns the options of the chat template ``template``. Raises ``BadRequestError`` if it lacks one."""
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise BadRequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    variables = dict(fields.chat_template_kwargs or {})
    if fields.documents is not None:
        variables["documents"] = fields.documents
    if fields.reasoning_effort is not None:
        variables = _effort_variables(fields.reasoning_effort, template) | variables
    return TemplateOptions(
        add_generation_prompt=fields.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        add_special_tokens=add_special_tokens,
        variables=variables,
    )


def _effort_variables(effort: str, template: str) -> dict[str, Any]:
    """Returns the variables of ``template`` that say how long the model reasons. Raises ``BadRequestError`` if it has
    none.
    """
    variables: dict[str, Any] = {}
    if "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    if "enable_thinking" in template:
        variables["enable_thinking"] = effort != "none"
    if not variables and effort != "none":
        raise BadRequestError(
            "reasoning_effort cannot be honoured: this model's chat template has no such setting",
            param="reasoning_effort",
        )
    return variables
