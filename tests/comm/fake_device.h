// A device of torch's spare type (PrivateUse1) that works as a GPU does: calls enqueue on the current stream of their
// thread and return, each stream works in order on a thread of its own, events order streams. Its memory is the
// host's, so that tests can look. What symmetric groups do there is what they do on CUDA.
#pragma once

#include <functional>

#include <c10/core/Device.h>

namespace dovetail::comm::fake_device {

// Runs at once on CPU, else in order of the device's current stream.
void on_current_stream(c10::Device device, std::function<void()> work);

// Blocks until the current stream is done. Throws what its work threw first.
void synchronize(c10::Device device);

}  // namespace dovetail::comm::fake_device
