"""Running a model with its experts spread over a GPU and the CPU.

inject          which module goes where, by rules; a report before anything is loaded
devices         words like "gpu" to what this machine has; tensors across device borders
device_experts  experts computed by torch
cpu_experts     experts computed by the native engine from the mapped store
moe             one layer's experts, both sides together
loader          model, store, rules or plan to a network that is ready
engine          prompt to text
"""
