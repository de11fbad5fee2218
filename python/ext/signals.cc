// Signals for the program that `forebay run` waits for.
#include "base/signal_forwarding.h"
#include "common.h"

namespace forebay::python {

void BindSignals(nb::module_& m) {
  nb::class_<SignalForwarding>(m, "SignalForwarding",
                               "Hands signals that reach this process on to one child of it.")
      .def(
          "__init__",
          [](SignalForwarding* self, const std::vector<int>& signals) {
            new (self) SignalForwarding(signals);
          },
          nb::arg("signals"))
      .def("send_to", &SignalForwarding::SendTo, nb::arg("child"))
      .def("stop", &SignalForwarding::Stop, "Before the child is reaped.");
}

}  // namespace forebay::python
