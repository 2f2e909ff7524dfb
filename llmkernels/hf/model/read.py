"""Reads the template of a description off what a small model was seen to compute: `read(record)`.

Products and attention are those that ran; norms, rotations and activations are known by their numbers.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmkernels.ops.activation import ACTIVATIONS

from ..classes import layout
from ..classes.options import Rotation
from ..classes.recorder import Node
from ..errors import UnknownLayout
from .description import MLP, Attention, Branch, Description, Layer, Norm, Product
from .embeddings import first_row, position_embedding_of, token_embedding
from .numbers import attend, is_close, rotation_of, tokens_first, window_of
from .observe import Number, Record, number_of
from .template import Factor, Path, Template, Window


def read(record: Record) -> Template:
    """The template of a model. Raises UnknownLayout where it computes what no description has."""
    return _Reader(record).template()


class _Reader:
    def __init__(self, record: Record):
        self.record = record
        self.tokens = record.logits.value.shape[1]
        self.stack = _stack(record)
        self._norms: dict[str, Norm] = {}
        self._rotaries: set[str] = set()

    def template(self) -> Template:
        head, logit_scale, softcap = self._head(self.record.logits)
        norm, stream = self._normed(head.args[0])
        if norm is None:
            raise UnknownLayout("has no norm behind its layers")
        starts, terms = self._terms(stream)
        embedding, embed_scale = token_embedding(starts[0])
        position_embedding, first_position = position_embedding_of(self.record, starts[1:])
        layers = self._layers(starts, terms)
        rotated = [layer.attention for layer in layers if layer.attention.table is not None]
        rotations = {(one.interleaved, one.alternates) for one in rotated}
        if len(rotations) > 1 or len(self._rotaries) > 1:
            raise UnknownLayout("has layers that rotate in different ways")
        if rotated:  # tables are laid out alike for all layers
            layers = [_rotating_as(layer, *next(iter(rotations))) for layer in layers]
        description = Description(
            embedding=embedding,
            embed_scale=embed_scale,
            position_embedding=position_embedding,
            first_position=first_position,
            rotary=next((Path(name) for name in self._rotaries), None),
            tables=tuple(sorted({one.table for one in rotated})),
            positions=range(0),
            layers=tuple(layers),
            norm=norm,
            head=self._product([head]),
            logit_scale=logit_scale,
            logit_softcap=softcap,
        )
        return Template(description, self.stack)

    # --- from the logits to the stream

    def _head(self, logits: Node) -> tuple[Node, Factor, Factor | float]:
        """The product behind everything, what multiplies it, and what caps it."""
        node, scales, cap = logits, [], None
        while (node := node.stripped()).kind != "product":
            if node.kind == "scale":
                scales.append(node.args[1])
            elif node.kind == "tanh" and cap is None:
                cap, scales = Factor(tuple(scales)), []
            else:
                raise UnknownLayout(f"computes logits by {node.said}")
            node = node.args[0]
        if cap is None:
            return node, Factor(tuple(scales)), 0.0
        return node, Factor((*scales, *cap.numbers)), cap

    def _terms(self, stream: Node) -> tuple[list[Node], list[Node]]:
        """What a residual stream begins with, embeddings of positions last, and what is added to it, in the order in
        which it was computed."""
        summands = _summands(stream)
        starts = [node for node in summands if not node.nearest("product", "attention")]
        if not starts:
            raise UnknownLayout(f"adds what {summands[0].said} makes to the residual stream, which begins with nothing")
        starts.sort(key=self._is_of_positions)
        if len(starts) > 1 + self._is_of_positions(starts[-1]):
            raise UnknownLayout(f"has a residual stream that begins with {len(starts)} tensors")
        terms = [node for node in summands if node not in starts]
        if len({*terms}) < len(terms):
            raise UnknownLayout("adds the same twice")
        return starts, terms

    def _is_of_positions(self, start: Node) -> bool:
        return first_row(self.record, start) is not None

    # --- layers

    def _layers(self, starts: list[Node], terms: list[Node]) -> list[Layer]:
        found = []
        for term in terms:
            multiplier, post, output = self._term(term)
            inner, end = self._inner(output.args[0])
            block, entrance = self._block(end, output)
            pre, source = self._normed(entrance)
            if post is not None and post.options.kind != "rms_norm":
                raise UnknownLayout(f"has a {post.options.kind} behind a block")
            found.append((output.order, term, Branch(block, pre, post, multiplier, inner), _summands(source)))
        found.sort(key=lambda one: (len(one[3]), one[0]))
        added, layers, calls = [*starts], [], len(self.record.attentions)
        for index, members in itertools.groupby(found, key=lambda one: self._layer_of(one[2])):
            group, before = list(members), len(added)
            sources = []
            for _, term, _, summands in group:
                if {*summands} != {*added[: len(summands)]} or len(summands) < before:
                    raise UnknownLayout("has a block that reads something of its own")
                sources.append(len(summands) - before)
                added.append(term)
            if sources not in (list(range(len(group))), [0] * len(group)):
                raise UnknownLayout("has layers whose blocks read neither the layer's input nor what is before them")
            branches = tuple(branch for _, _, branch, _ in group)
            if sum(isinstance(branch.block, Attention) for branch in branches) != 1:
                raise UnknownLayout("has layers without attention, or with two")
            if index != len(layers):
                raise UnknownLayout("runs its layers in another order, or not all of them")
            layers.append(Layer(branches, parallel=len(group) > 1 and sources[-1] == 0))
        if len(layers) != calls:
            raise UnknownLayout(f"attends {calls} times in {len(layers)} layers")
        return layers

    def _layer_of(self, branch: Branch) -> int:
        name = branch.last.weights[0].name
        if not name.startswith(f"{self.stack}."):
            raise UnknownLayout(f"adds {name}, which is no part of a layer")
        return self._layer_at(name)

    def _term(self, term: Node) -> tuple[Factor, Norm | None, Node]:
        """What multiplies a summand, the norm of the block, and its last product."""
        numbers, post, node = [], None, term
        while (node := node.stripped()).kind != "product":
            if node.kind == "scale" and post is None:
                numbers.append(node.args[1])
            elif node.kind == "module" and post is None:
                post = self._norm(node)
            else:
                raise UnknownLayout(f"adds what {node.said} makes to a residual stream")
            node = node.args[0]
        return Factor(tuple(numbers)), post, node

    def _normed(self, node: Node) -> tuple[Norm | None, Node]:
        """The norm that a tensor is the result of, if it is, and what it was made of."""
        node = node.stripped()
        return (self._norm(node), node.args[0].stripped()) if node.kind == "module" else (None, node)

    def _inner(self, node: Node) -> tuple[Norm | None, Node]:
        """The same, of what the last product of a block reads, which may be the result of another module."""
        try:
            return self._normed(node)
        except UnknownLayout:
            return None, node

    def _block(self, end: Node, output: Node) -> tuple[Attention | MLP, Node]:
        """The block whose last product this is, of what it makes before that, and what its first ones read."""
        before = end.nearest("product", "attention")
        if [node.kind for node in before] == ["attention"]:
            return self._attention(before[0], end, output)
        return self._mlp(before, end.value, output)

    # --- MLPs

    def _mlp(self, before: list[Node], hidden: Tensor, output: Node) -> tuple[MLP, Node]:
        tries = [((one,), (None, one.value)) for one in before[:1]]
        if len(before) == 2:
            tries = [((a, b), (a.value, b.value)) for a, b in itertools.permutations(before)]
        elif before and before[0].value.shape[-1] == 2 * hidden.shape[-1]:
            tries = [((before[0],), before[0].value.chunk(2, -1))]
        if len(before) not in (1, 2) or len({node.args[0].stripped() for node in before}) > 1:
            raise UnknownLayout(f"has an MLP of an unknown layout: {len(before)} products before {output.said}")
        for (products, (gate, up)), (name, act) in itertools.product(tries, ACTIVATIONS.items()):
            if is_close(hidden, act(up) if gate is None else act(gate) * up):
                mlp = MLP(self._product(products), self._product([output]), name, gate is not None)
                return mlp, before[0].args[0]
        raise UnknownLayout(f"has an activation without a kernel before {output.said}")

    # --- attention

    def _attention(self, call: Node, end: Node, output: Node) -> tuple[Attention, Node]:
        q, k, v, _ = call.args
        if not is_close(end.value, call.value, 0):
            raise UnknownLayout("changes what attention gives before the product behind it")
        layer = call.options["layer"]
        if layer != self._layer_at(call.name) or call.options["layer of v"] != layer:
            raise UnknownLayout(f"has an attention with layer {layer} of the cache")
        products, heads, by_head = self._heads((q, k, v))
        if heads[2].norm is not None or heads[2].rotation is not None:
            raise UnknownLayout("has an attention that normalizes or rotates v")
        if _multipliers(k) or _multipliers(v):
            raise UnknownLayout("has an attention that multiplies k or v by a number")
        q_norm, k_norm, row_norms = self._head_norms(heads)
        rotation, table = heads[0].rotation, heads[0].table
        if (rotation, table) != (heads[1].rotation, heads[1].table):
            raise UnknownLayout("rotates q and k in different ways")
        scale, softcap, window = self._scores(call)
        scale = Factor((*scale.numbers, *_multipliers(q)))
        attention = Attention(
            qkv=self._product(products),
            output=self._product([output]),
            heads=0,
            kv_heads=0,
            head_dim=q.value.shape[-1],
            scale=scale,
            window_left=window,
            softcap=softcap,
            table=table,
            interleaved=rotation is not None and rotation.interleaved,
            alternates=rotation is not None and rotation.interleaved and rotation.table == "elements",
            q_norm=q_norm,
            k_norm=k_norm,
            row_norms=row_norms,
            by_head=by_head,
        )
        return attention, products[0].args[0]

    def _heads(self, qkv: Sequence[Node]) -> tuple[list[Node], list["_Heads"], bool]:
        """The products that q, k and v are made of, and how; whether those are rows of one product head by head."""
        found = []
        for x in qkv:
            near = x.nearest("product", "attention", "module", "tables")
            norms, tables = ([node for node in near if node.kind == kind] for kind in ("module", "tables"))
            before = norms[0].args[0].nearest("product", "attention") if norms else []
            before += [node for node in near if node.kind in ("product", "attention")]
            if [node.kind for node in before] != ["product"] or len(norms) > 1:
                raise UnknownLayout("has an attention of an unknown layout: q, k and v are more than products")
            value = x.value / Factor(_multipliers(x)).value
            found.append((value.transpose(1, 2)[0], before[0], norms, tables))
        products = list(dict.fromkeys(product for _, product, _, _ in found))
        values = [value for value, *_ in found]
        widths = [value[0].numel() for value in values]
        if [node.value.shape[-1] for node in products] != (widths if len(products) == 3 else [sum(widths)]):
            raise UnknownLayout("has an attention of an unknown layout: q, k and v are not the rows of its products")
        if len({node.args[0].stripped() for node in products}) > 1:
            raise UnknownLayout("has an attention whose products read different tensors")
        rows = products[0].value[0]
        parts = rows.split(widths, 1) if len(products) == 1 else [node.value[0] for node in products]
        by_head = len(products) == 1 == len({*widths}) and not is_close(parts[2], values[2])
        if by_head:
            parts = [x.flatten(1) for x in rows.view(self.tokens, -1, 3, values[0].shape[-1]).unbind(2)]
        made = zip(values, parts, found, strict=True)
        return products, [self._made_of(*pair, norms, tables) for *pair, (_, _, norms, tables) in made], by_head

    def _made_of(self, value: Tensor, before: Tensor, norms: list[Node], tables: list[Node]) -> "_Heads":
        """How (T, heads, D) are made of a product (T, heads * D)."""
        norm = None
        if norms:
            try:
                norm = self._norm(norms[0])
            except UnknownLayout as reason:
                raise UnknownLayout(f"has norms of q and k without a kernel: {reason}") from None
            if not is_close(tokens_first(norms[0].args[0].value, self.tokens), before, 0):
                raise UnknownLayout("has norms of q and k of an unknown layout")
            before = tokens_first(norms[0].value, self.tokens)
        rotation = rotation_of(before.reshape(value.shape), value, tables)
        if rotation is None:
            return _Heads(norm, None, None, value.shape[-1])
        names = [x for x in tables[0].args if isinstance(x, str)]
        if len([*tables[0].nodes()]) != 2 or len(names) > 1:
            raise UnknownLayout("makes tables of a rotation of more than positions")
        self._rotaries.add(tables[0].name)
        return _Heads(norm, rotation, next(iter(names), ""), value.shape[-1])

    def _head_norms(self, heads: list["_Heads"]) -> tuple[Norm | None, Norm | None, bool]:
        q, k = heads[0].norm, heads[1].norm
        if q is None and k is None:
            return None, None, False
        if q is None or k is None:
            raise UnknownLayout("has a norm of q or of k alone")
        if q.options != k.options or q.eps.value != k.eps.value:
            raise UnknownLayout("has norms of q and k that differ")
        if q.options.kind != "rms_norm" or q.weight is None:
            raise UnknownLayout("has norms of q and k without a kernel")
        return q, k, self._shape(q.weight)[0] != heads[0].head_dim

    def _scores(self, call: Node) -> tuple[Factor, Factor | float, Window | int]:
        """The scale, the softcap and the window with which an attention gives what it gives, to loud queries, too."""
        q, k, v, mask = (x.value if isinstance(x, Node) else x for x in call.args)
        scale = call.options.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        window = window_of(mask, self.tokens)
        caps = {x for name, x in call.options.items() if name != "scaling" and isinstance(x, float) and x > 0}
        function = call.options["function"]
        errors = {}
        for cap in (0.0, *sorted(caps)):
            pairs = [(function(loud * q), attend(loud * q, k, v, scale, cap, window)) for loud in (1.0, 16.0)]
            errors[cap] = max(float((found - expected).abs().max() / found.abs().max()) for found, expected in pairs)
        cap = min(errors, key=errors.get)
        if not errors[cap] < 1e-4:
            raise UnknownLayout(f"has an attention without a kernel: it differs by {errors[cap]:.1g}")
        return self._factor(scale, call.name), self._factor(cap, call.name) if cap else 0.0, window

    # --- parts

    def _factor(self, value: float, path: str) -> Factor:
        return Factor((number_of(self.record.model, value, [path]),))

    def _shape(self, path: Path) -> torch.Size:
        return self.record.model.get_parameter(path.name).shape

    def _norm(self, node: Node) -> Norm:
        if node.name not in self._norms:
            module = self.record.model.get_submodule(node.name)
            try:
                options, weight, bias, eps = layout.norm_of_module(module, node.args[0].value)
            except UnknownLayout as reason:
                raise UnknownLayout(f"has the module {type(module).__name__}: {reason}") from None
            paths = (None if name is None else Path(f"{node.name}.{name}") for name in (weight, bias))
            self._norms[node.name] = Norm(options, *paths, Number(eps, node.name, options.eps))
        return self._norms[node.name]

    def _product(self, nodes: Sequence[Node]) -> Product:
        weights, biases = zip(*(node.args[1:] for node in nodes), strict=True)
        if len({bias is None for bias in biases}) > 1:
            raise UnknownLayout(f"has a bias in some products of {nodes[0].said} and its like only")
        biases = () if biases[0] is None else biases
        transposed = any("transposed" in node.options for node in nodes)
        if transposed and len(nodes) > 1:
            raise UnknownLayout(f"has several products like {nodes[0].said}, whose weights are transposed")
        return Product(
            *(tuple(Path(node.name) for node in group) for group in (weights, biases)), transposed=transposed
        )

    def _layer_at(self, path: str) -> int:
        return int(path[len(self.stack) + 1 :].split(".")[0])


@dataclass(frozen=True)
class _Heads:
    """How q, k or v is made of a product: by a norm, then a rotation by the table of this name."""

    norm: Norm | None
    rotation: Rotation | None
    table: str | None
    head_dim: int


def _multipliers(node: Node) -> tuple[Number, ...]:
    """The numbers by which a tensor was multiplied last."""
    return tuple(node.unscaled()[1])


def _stack(record: Record) -> str:
    """The path of the list of layers."""
    parts = record.attentions[0].name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if isinstance(record.model.get_submodule(path), nn.ModuleList):
            return path
    raise UnknownLayout(f"has an attention in no list of layers, {record.attentions[0].name}")


def _summands(node: Node) -> list[Node]:
    node = node.stripped()
    return [x for side in node.args for x in _summands(side)] if node.kind == "add" else [node]


def _rotating_as(layer: Layer, interleaved: bool, alternates: bool) -> Layer:
    branches = tuple(
        dataclasses.replace(
            branch, block=dataclasses.replace(branch.block, interleaved=interleaved, alternates=alternates)
        )
        if isinstance(branch.block, Attention)
        else branch
        for branch in layer.branches
    )
    return dataclasses.replace(layer, branches=branches)
