"""Models, classifiers and tokenizers from a folder: safetensors and JSON only; nothing is fetched, no code there is run.

Guarantees: the code that computes is chosen here, never by a folder's config.json; the control tokens of a conversation are
exactly the tokens that its chat template writes, for any messages and tools (see `infra.model.controls`).
"""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infra.model.controls import FREE_CHARS, Controls
from infra.model.names import published
from infra.model.vision import NO_FRAME, Vision, load_vision, not_loadable, takes_pictures
from infra.model.writing import as_template_takes, content_of, detect_writing
from infra.policies.tensors import Blocks, Tensor, from_torch_all, load_tensors, to_torch
from schemas.errors import ConfigError
from schemas.records import Message

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DTYPES = tuple(DTYPE_NAMES.values())


class Tokenizer:
    """Text to token ids and back, with the model's chat template.

    eos_ids: that end a response; the first is the tokenizer's own. num_tokens: ids that it knows; the model may have more.
    wrapped: tokenizer of transformers, for a library that needs it.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: tuple[int, ...],
        vision: Vision | None = None,
        template: Mapping[str, Any] = MappingProxyType({}),
        parsers: tuple[str, str] = ("", ""),
    ) -> None:
        """template: variables of the chat template besides the conversation, such as enable_thinking. parsers: of tool calls
        and of reasoning, "" for those of the template.
        """
        self.template = dict(template)
        self.writing = detect_writing(str(tokenizer.chat_template), *parsers)
        self.wrapped = tokenizer
        # Called directly: the wrapper of transformers takes longer than the backend, and alters it, so that threads clash.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._controls = Controls(self._backend, also=tuple(tokenizer.all_special_tokens))
        self.num_tokens = len(tokenizer)  # `len` counts the tokens at each call
        self.eos_ids = eos_ids
        self.takes_images = vision is not None
        self._vision = vision
        self._frame = NO_FRAME if vision is None else vision.frame(tokenizer)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: `decode` leaves them out."""
        added = self.wrapped.added_tokens_decoder.items()
        return frozenset((*self.wrapped.all_special_ids, *(token for token, spelled in added if spelled.special)))

    def prepare(self) -> None:
        """Be ready for strange text from the first on (see `infra.model.controls`): it takes as long as loading did."""
        self._controls.prepare()

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, nothing put before or after it."""
        return self._controls.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens, and ids the tokenizer does not know, give nothing."""
        known = [int(token) for token in ids if 0 <= token < self.num_tokens]
        if len(known) > FREE_CHARS:
            return str(self._backend.decode_batch([known], skip_special_tokens=True)[0])  # lets other threads run
        return str(self._backend.decode(known, skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens by their names."""
        known = [token for token in ids if 0 <= token < self.num_tokens]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation up to where the assistant's next answer begins, each image as all of its places.

        Raises ValueError for images that the model does not take, or that the template does not write.
        """
        conversation = [
            {"role": message.role, "content": content_of(message.content, len(message.images))} for message in messages
        ]
        ids = self._controls.encode_rendered(conversation, self._applied)
        return self._with_places(ids, sum(len(message.images) for message in messages))

    def _with_places(self, ids: list[int], num_images: int) -> list[int]:
        """The ids with each image as all of its places. Raises ValueError."""
        if self._vision is not None:
            return self._vision.expand(ids, num_images, self._frame)
        if num_images:
            raise ValueError(f"messages: got {num_images} images, expected none: the model reads text alone")
        return ids

    @property
    def takes_tools(self) -> bool:
        return "tools" in str(self.wrapped.chat_template)

    def encode_request(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation as a client wrote it: messages and tools are dictionaries, as templates take them, with the
        number of the message's images as `images`. Each image is all of its places.

        Raises ValueError where the template refuses it (roles in an order it does not know), or its images.
        """
        from jinja2.exceptions import TemplateError

        try:
            messages = [as_template_takes(message, self.writing) for message in conversation]
            ids = self._controls.encode_rendered(
                [messages, [dict(tool) for tool in tools]],
                lambda given: self._applied(given[0], tools=given[1] or None),
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error
        return self._with_places(ids, sum(message.get("images", 0) for message in conversation))

    def _applied(self, conversation: Any, tools: Any = None) -> str:
        text: str = self.wrapped.apply_chat_template(
            conversation, tools=tools, tokenize=False, add_generation_prompt=True, **self.template
        )
        return text


def load_tokenizer(
    folder: str | Path, template: Mapping[str, Any] = MappingProxyType({}), parsers: tuple[str, str] = ("", "")
) -> Tokenizer:
    """The tokenizer of a model folder (or of a model already in the local Hugging Face cache). Raises ConfigError.

    template, parsers: see `Tokenizer`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loadable("tokenizer", folder, "tokenizer.json", error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"tokenizer: {folder}: got a {type(tokenizer).__name__}, expected one with a tokenizer.json")
    if tokenizer.chat_template is None:
        raise ConfigError(f"tokenizer: {folder} has no chat template; put a chat_template.jinja into the folder")
    return Tokenizer(tokenizer, _eos_ids(str(folder), tokenizer.eos_token_id), load_vision(folder), template, parsers)


def save_settings(model: str, folder: Path) -> None:
    """Configuration, tokenizer with its chat template, and, where there are such, the generation settings and the image
    processor of a model in the local Hugging Face cache, as files of `folder`. Raises ConfigError.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig

    try:
        for kind in (AutoConfig, AutoTokenizer):
            kind.from_pretrained(model, local_files_only=True, trust_remote_code=False).save_pretrained(folder)
        if takes_pictures(model):
            processor = AutoImageProcessor.from_pretrained(model, local_files_only=True, trust_remote_code=False)
            processor.save_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loadable("model", model, "config.json and tokenizer.json", error)) from error
    with suppress(OSError):  # a model need not have one
        GenerationConfig.from_pretrained(model, local_files_only=True).save_pretrained(folder)


def context_tokens(folder: str | Path) -> int:
    """Tokens of the longest sequence a model takes, 0 where its configuration does not say. Raises ConfigError."""
    try:
        config = own_kernels(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(not_loadable("model", folder, "config.json", error)) from error
    return int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)


def load_model(folder: str | Path, *, dtype: str = "float32") -> "torch.nn.Module":
    """The causal language model of a folder, with its vision tower if it has one, on the CPU, in evaluation mode.

    dtype: see DTYPES. Raises ConfigError.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if takes_pictures(folder) else AutoModelForCausalLM
    return _loaded(kind, "model", folder, "config.json", dtype)


def _loaded(kind: Any, what: str, folder: str | Path, config: str, dtype: str) -> "torch.nn.Module":
    """The model of a folder as this class of transformers. Raises ConfigError where its files lack a weight."""
    import torch
    from safetensors import SafetensorError

    try:
        with no_progress_bars():
            model, found = kind.from_pretrained(
                str(folder),
                config=own_kernels(folder),
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(not_loadable(what, folder, f"{config} and *.safetensors", error)) from error
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{what}: {folder} has no weights of {missing[0]} ({len(missing)} are missing)")
    loaded: torch.nn.Module = model.eval()
    return loaded


def meta_model(folder: str | Path, *, dtype: str = "float32") -> "torch.nn.Module":
    """The model that a folder's config.json describes, on the meta device: shapes without weights. Raises ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if takes_pictures(folder) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            module: torch.nn.Module = kind.from_config(
                own_kernels(folder), dtype=getattr(torch, dtype), trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ConfigError(not_loadable("model", folder, "config.json", error)) from error
    return module


def gpu_bytes() -> int:
    """Memory of this machine's first GPU, 0 where it has none."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


def own_kernels(folder: str | Path) -> Any:
    """A folder's configuration without its choice of kernels: a name there may be that of a repository with code.

    Transformers then chooses the attention by itself. Raises OSError, ValueError.
    """
    from transformers import AutoConfig, PretrainedConfig

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    left = [config]
    while left:
        part = left.pop()
        # SDPA knows no soft cap of scores and would leave it out.
        part._attn_implementation = "eager" if getattr(part, "attn_logit_softcapping", None) else None
        part._experts_implementation = None
        left += [inner for inner in vars(part).values() if isinstance(inner, PretrainedConfig)]
    return config


def model_tensors(module: "torch.nn.Module", blocks: Blocks | None = None) -> dict[str, Tensor]:
    """A copy of every parameter and saved buffer, by its folder's names."""
    return from_torch_all(published(module, module.state_dict()), blocks)


def load_into(module: "torch.nn.Module", tensors: Mapping[str, Tensor], *, partial: bool = False) -> None:
    """Copy tensors into a model in place, converting to its dtype; nothing changes unless all of them fit.

    partial: names of the model may be absent. ValueError names the tensor that does not fit.
    """
    import torch

    state = published(module, module.state_dict())
    if unknown := sorted(set(tensors) - set(state)):
        raise ValueError(f"tensors: the model has no {unknown[0]} ({len(unknown)} unknown names)")
    if not partial and (missing := sorted(set(state) - set(tensors))):
        raise ValueError(f"tensors: {missing[0]} is missing ({len(missing)} of {len(state)} names)")
    for name, tensor in tensors.items():
        if tuple(state[name].shape) != tensor.shape:
            raise ValueError(f"tensors: {name}: got shape {tensor.shape}, expected {tuple(state[name].shape)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(to_torch(tensor))


def unlike(module: "torch.nn.Module", tensors: Mapping[str, Tensor]) -> str:
    """The first name under which a model on the CPU does not hold a tensor to the bit, in the model's dtype; "" for none."""
    import torch

    for name, held in published(module, module.state_dict()).items():
        wanted = tensors[name]
        if str(held.dtype).removeprefix("torch.") != DTYPE_NAMES.get(wanted.dtype):
            same = torch.equal(held, to_torch(wanted).to(held.dtype))
        else:
            data = held.contiguous().reshape(-1).view(torch.uint8).numpy()
            same = np.array_equal(data, np.frombuffer(wanted.data, np.uint8))
        if not same:
            return name
    return ""


def model_folder(model: str | Path) -> Path:
    """The folder itself, or where the local Hugging Face cache has a model of that name. Raises ConfigError."""
    if Path(model).is_dir():
        return Path(model)
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(str(model), "config.json", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.model: got {model}, which is no folder and not in the local cache: {error}"
        ) from error
    return Path(str(found)).parent


def file_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in a model folder's safetensors files, as they are, without torch. Raises ConfigError.

    The files are mapped: all readers share the memory, and a file that is replaced stays as it was.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open(path, "rb") as file:
                tensors |= load_tensors(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except ValueError as error:
            raise ConfigError(f"model: {path}: {error}") from error
    if not tensors:
        raise ConfigError(f"model: {folder} holds no *.safetensors file")
    return tensors


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """`file_tensors` that versions of the model have too: files may hold more, such as a tied output matrix."""
    tensors, module = file_tensors(folder), meta_model(folder)
    return {name: tensors[name] for name in published(module, module.state_dict()) if name in tensors}


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing on a terminal that belongs to the command."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _eos_ids(folder: str, own: int | None) -> tuple[int, ...]:
    from transformers import GenerationConfig

    ids = [] if own is None else [own]
    try:
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:  # a model folder need not have one
        ends = None
    ids += [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if not ids:
        raise ConfigError(f"tokenizer: {folder} names no end-of-sequence token; set eos_token in tokenizer_config.json")
    return tuple(dict.fromkeys(int(token) for token in ids))


def load_classifier(folder: str | Path) -> Callable[[Sequence[int]], list[float]]:
    """The sequence classifier of a folder, in float32: logits of tokens. Raises ConfigError."""
    import torch
    from transformers import AutoModelForSequenceClassification

    kind, described = AutoModelForSequenceClassification, "config.json of a sequence classifier"
    module = _loaded(kind, "classifier", folder, described, "float32")

    def logits(tokens: Sequence[int]) -> list[float]:
        with torch.inference_mode():
            return [float(value) for value in module(input_ids=torch.tensor([list(tokens)])).logits[0]]

    return logits
