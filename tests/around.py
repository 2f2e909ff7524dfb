"""Models that change what the forward of transformers' class returns, as users write them. For tests."""

import torch
from transformers import LlamaForCausalLM


class ScaledForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.gain = 0.5

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.gain
        return output


class CappedForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        output = super().forward(input_ids, attention_mask, **kwargs)
        output["logits"] = torch.tanh(output["logits"] / 3.0) * 3.0
        return output


class ScaledWithPositions(ScaledForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        output = LlamaForCausalLM.forward(self, input_ids, attention_mask, position_ids, **kwargs)
        output.logits = self.gain * output.logits
        return output


class CappedWithPositions(CappedForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


class SeenForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        self.logits = output.logits
        return output
