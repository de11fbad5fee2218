// UCX active messages. A large payload travels by rendezvous: its header comes first, the receiver
// names the place, and the fabric writes there; others travel with their header and are copied.
//
// UCX's callbacks only write down what happened. The handler is called afterwards, outside of UCX,
// so that it may send and close without meeting UCX in the middle of something. Messages that came
// whole are the exception: the handler hears of them in the callback, may send there, and what it
// closes is closed afterwards. Callbacks of sends never begin anything: UCX may call them from
// within another send.
//
// Each message starts with a number that its receiver chose at random for that connection: an
// endpoint's own number could be guessed by somebody who has not proven the job's secret.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <ucp/api/ucp.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/owned.h"
#include "transport/socket_address.h"
#include "transport/transport.h"
#include "transport/ucx/ucx_config.h"
#include "transport/ucx_library.h"

namespace forebay {
namespace {

constexpr unsigned kHelloId = 1;
constexpr unsigned kDataId = 2;
constexpr uint32_t kMagic = 0x32594246;  // "FBY2"
// Payloads under way to us on one connection: more than a link needs to be busy, and no more than
// fits a core's cache on its way through the sockets' buffers (64 samples at once took 2.5 times
// the processor time of 8).
constexpr size_t kMostReceiving = 1 << 20;
// Connections that somebody made and has said nothing on.
constexpr size_t kMostStrangers = 64;
// Messages that may overtake one.
constexpr size_t kMostEarly = 4096;
constexpr size_t kMostEarlyBytes = 64 << 20;
// What UCX has not given back so long after it has closed an endpoint, it will not touch any more.
constexpr Nanos kCloseWait = 2 * kSecond;
// UCX 1.13 gives an endpoint back at once when it has to; others may not.
constexpr Nanos kEndpointWait = 5 * kSecond;

struct Hello {
  uint32_t magic = kMagic;
  uint32_t answer = 0;  // 1: from the one that was asked
  uint64_t mine = 0;    // put this in front of what you send me
  uint64_t yours = 0;   // answer: what you said
  uint64_t eager = 0;   // send me no larger payloads without a rendezvous
};

struct Prefix {
  uint64_t token = 0;
  uint32_t sequence = 0;
  uint32_t reserved = 0;
};

Status UcxStatus(ucs_status_t status, const char* what) {
  Code code = Code::kUnavailable;
  if (status == UCS_ERR_CANCELED) code = Code::kCancelled;
  if (status == UCS_ERR_NO_MEMORY) code = Code::kResourceExhausted;
  if (status == UCS_ERR_TIMED_OUT || status == UCS_ERR_ENDPOINT_TIMEOUT) {
    code = Code::kDeadlineExceeded;
  }
  return Status(code, StrCat(what, ": ", ucs_status_string(status)));
}

uint64_t RandomToken() {
  uint64_t token = 0;
  while (token == 0) {
    if (::getrandom(&token, sizeof token, 0) != sizeof token) token = 0;
  }
  return token;
}

struct Connection;
class UcxTransport;

// A send or a receive that UCX has under way.
struct Operation {
  enum class Kind { kHello, kSend, kReceive } kind = Kind::kSend;
  UcxTransport* transport = nullptr;
  Connection* connection = nullptr;  // nullptr: nobody waits for it any more
  uint64_t tag = 0;
  std::vector<std::byte> header;  // UCX reads it until the end
  std::span<std::byte> place;     // kReceive
  void* data = nullptr;           // kReceive: not begun yet, UCX keeps this for it
  size_t at = 0;                  // in the connection's list
};

// A message that has come and could not be delivered at once.
struct Arrival {
  std::vector<std::byte> header;
  std::vector<std::byte> payload;
  void* data = nullptr;  // a rendezvous: what UCX keeps of it for us
  size_t length = 0;
};

struct Connection {
  ConnectionId id = 0;
  ucp_ep_h endpoint = nullptr;
  uint64_t token = 0;         // in front of what comes
  uint64_t remote_token = 0;  // in front of what goes; 0: not known yet
  bool accepted = false;
  bool open = false;
  bool leaving = false;  // the handler has closed it, in the middle of UCX's work
  bool closing = false;
  bool closed = false;  // UCX has given the endpoint back
  Nanos deadline = 0;   // of opening; of closing; when closed: of what is still under way
  Status why;
  size_t eager = 0;  // the largest payload that the other side takes without a rendezvous
  uint32_t next_out = 0;
  uint32_t next_in = 0;
  size_t queued = 0;                  // messages among the events
  std::map<uint32_t, Arrival> early;  // came before those in front of them
  size_t early_bytes = 0;             // of their payloads
  std::vector<Operation*> operations;
  std::deque<Operation*> waiting;  // those of them that wait until fewer bytes are under way
  size_t receiving = 0;            // bytes
};

struct Event {
  enum class Kind { kAsked, kHello, kMessage, kEnded, kLeft, kFailed, kClosed };
  Kind kind = Kind::kEnded;
  ucp_conn_request_h request = nullptr;  // kAsked
  ucp_ep_h endpoint = nullptr;           // kHello: where it came from
  Hello hello;
  Prefix prefix;  // kMessage
  Arrival arrival;
  Operation* operation = nullptr;  // kEnded
  ConnectionId connection = 0;     // kLeft, kFailed, kClosed
  ucs_status_t status = UCS_OK;
};

class UcxTransport final : public Transport {
 public:
  UcxTransport(const TransportOptions& options, TransportHandler& handler)
      : options_(options), handler_(handler) {}
  ~UcxTransport() override;

  Status Start();

  std::string address() const override { return address_; }
  std::string Describe() const override;
  Status Register(std::span<std::byte> memory) override;
  Result<ConnectionId> Connect(const std::string& address) override;
  void Close(ConnectionId id) override;
  Status Send(ConnectionId id, std::span<const std::byte> header,
              std::span<const std::byte> payload, uint64_t tag) override;
  bool Progress() override;
  void Wait(std::span<const int> wake_fds, Nanos wait) override;
  void Wake() override;

 private:
  // UCX's callbacks.
  static void OnAsked(ucp_conn_request_h request, void* self);
  static void OnFailed(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t OnHello(void* self, const void* header, size_t header_bytes, void* data,
                              size_t length, const ucp_am_recv_param_t* param);
  static ucs_status_t OnData(void* self, const void* header, size_t header_bytes, void* data,
                             size_t length, const ucp_am_recv_param_t* param);
  static void OnSendEnd(void* request, ucs_status_t status, void* operation);
  static void OnReceiveEnd(void* request, ucs_status_t status, size_t length, void* operation);
  static void OnCloseEnd(void* request, ucs_status_t status, void* self);

  // What they have written down.
  void Dispatch(Event& event);
  void Asked(ucp_conn_request_h request);
  void Greeted(const Event& event);
  void Arrived(Event& event);
  void Deliver(Connection& connection, Arrival arrival);
  void DeliverEager(ConnectionId id, std::span<const std::byte> header,
                    std::span<const std::byte> payload);
  void Receive(Connection& connection);
  void Ended(Operation* operation, ucs_status_t status);

  Result<Connection*> Add(ucp_ep_params_t params, bool accepted);
  Status Greet(Connection& connection, bool answer);
  void Shut(Connection& connection, Status why);
  void Leave(Connection& connection);
  void Release(const Arrival& arrival);
  bool MayLeave(Connection& connection, Nanos now);
  void Reap();
  Operation* Begin(Connection& connection, Operation::Kind kind, uint64_t tag);
  void Forget(Operation* operation);
  Status Post(Operation* operation, unsigned id, std::span<const std::byte> payload,
              uint32_t flags);
  ucp_mem_h Registered(std::span<const std::byte> memory) const;
  void NoteTransports(ucp_ep_h endpoint);

  const TransportOptions options_;
  TransportHandler& handler_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int event_fd_ = -1;
  size_t eager_ = 0;     // as Connection's, of this side
  bool inside_ = false;  // ucp_worker_progress
  OwnedFd wake_;
  std::string address_;
  std::set<std::string> transports_;
  std::vector<std::pair<std::span<std::byte>, ucp_mem_h>> registered_;
  std::unordered_map<ConnectionId, std::unique_ptr<Connection>> connections_;
  std::unordered_map<uint64_t, Connection*> by_token_;
  std::unordered_map<ucp_ep_h, Connection*> by_endpoint_;
  ConnectionId next_connection_ = 1;
  size_t changing_ = 0;  // connections that are neither open nor gone: the clock matters to them
  size_t strangers_ = 0;
  bool told_ = false;  // of an endpoint that UCX keeps
  std::deque<Event> events_;
  std::vector<std::unique_ptr<Operation>> free_;
  const uint64_t generation_ = ForkGeneration();
};

// ---- the life of the transport

Status UcxTransport::Start() {
  wake_ = OwnedFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_.valid()) return ErrnoStatus(errno, "eventfd");
  const Result<SocketAddress> listen = ParseSocketAddress(options_.listen);
  if (!listen) return listen.error();

  Result<ucp_config_t*> config = UcxConfig(*listen, &eager_);
  if (!config) return config.error();
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "forebay";
  ucs_status_t status = ucp_init(&params, *config, &context_);
  ucp_config_release(*config);
  if (status != UCS_OK) return UcxStatus(status, "ucp_init");

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return UcxStatus(status, "ucp_worker_create");
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
  status = ucp_worker_query(worker_, &attributes);
  if (status != UCS_OK) return UcxStatus(status, "ucp_worker_query");
  if (attributes.max_am_header < kMaxHeader + sizeof(Prefix)) {
    return Status(Code::kUnimplemented,
                  StrCat("this UCX takes headers of ", attributes.max_am_header, " bytes only"));
  }
  status = ucp_worker_get_efd(worker_, &event_fd_);
  if (status != UCS_OK) return UcxStatus(status, "ucp_worker_get_efd");

  const auto handle = [&](unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = callback;
    handler.arg = this;
    return ucp_worker_set_am_recv_handler(worker_, &handler);
  };
  status = handle(kHelloId, OnHello);
  if (status == UCS_OK) status = handle(kDataId, OnData);
  if (status != UCS_OK) return UcxStatus(status, "ucp_worker_set_am_recv_handler");

  ucp_listener_params_t listener{};
  listener.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  listener.sockaddr.addr = listen->get();
  listener.sockaddr.addrlen = listen->length;
  listener.conn_handler.cb = OnAsked;
  listener.conn_handler.arg = this;
  status = ucp_listener_create(worker_, &listener, &listener_);
  if (status != UCS_OK) return UcxStatus(status, StrCat("listen at ", options_.listen).c_str());
  ucp_listener_attr_t listening{};
  listening.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &listening);
  if (status != UCS_OK) return UcxStatus(status, "ucp_listener_query");
  SocketAddress at;
  at.storage = listening.sockaddr;
  address_ = at.ToString();
  return Status();
}

UcxTransport::~UcxTransport() {
  if (generation_ != ForkGeneration()) return;  // the worker and its sockets are the parent's
  for (const Event& event : events_) {
    if (event.kind == Event::Kind::kAsked) ucp_listener_reject(listener_, event.request);
  }
  std::erase_if(events_, [](const Event& e) { return e.kind == Event::Kind::kAsked; });
  if (listener_ != nullptr) ucp_listener_destroy(listener_);
  if (worker_ != nullptr) {
    for (auto& [id, connection] : connections_) {
      if (!connection->closing) Shut(*connection, Status(Code::kCancelled, "the transport ends"));
    }
    // Nobody's memory is touched after this: what is under way has ended before.
    const Nanos until = SteadyClock().Now() + kCloseWait;
    const auto all_closed = [&] {
      return std::all_of(connections_.begin(), connections_.end(), [](const auto& one) {
        return one.second->closed && one.second->operations.empty();
      });
    };
    while (true) {
      while (ucp_worker_progress(worker_) > 0) {
      }
      while (!events_.empty()) {
        Event event = std::move(events_.front());
        events_.pop_front();
        if (event.kind == Event::Kind::kMessage) {
          Release(event.arrival);
        } else if (event.kind == Event::Kind::kEnded) {
          Forget(event.operation);
        } else if (event.kind == Event::Kind::kClosed) {
          const auto it = connections_.find(event.connection);
          if (it != connections_.end()) it->second->closed = true;
        }
      }
      if (all_closed() || SteadyClock().Now() > until) break;
      Wait({}, 10 * kMilli);
    }
    for (auto& [memory, handle] : registered_) ucp_mem_unmap(context_, handle);
    ucp_worker_destroy(worker_);
  }
  if (context_ != nullptr) ucp_cleanup(context_);
  // Those that UCX kept are of no use to anyone now.
  for (auto& [id, connection] : connections_) {
    for (Operation* operation : connection->operations) delete operation;
  }
}

std::string UcxTransport::Describe() const {
  std::string names;
  for (const std::string& name : transports_) names += (names.empty() ? "" : ", ") + name;
  return StrCat("ucx ", ucp_get_version_string(), names.empty() ? "" : StrCat(" (", names, ")"));
}

// UCX 1.13 tells which transports an endpoint uses only in what it prints: "lane[0]:  3:tcp/eth0".
void UcxTransport::NoteTransports(ucp_ep_h endpoint) {
  char* text = nullptr;
  size_t size = 0;
  FILE* const stream = ::open_memstream(&text, &size);
  if (stream == nullptr) return;
  ucp_ep_print_info(endpoint, stream);
  std::fclose(stream);
  for (const char* at = text; (at = std::strstr(at, "lane[")) != nullptr; ++at) {
    const char* const bracket = std::strchr(at, ']');
    if (bracket == nullptr) break;
    const char* const name = bracket[1] == ':' ? std::strchr(bracket + 2, ':') : nullptr;
    if (name == nullptr) continue;
    const size_t length = std::strcspn(name + 1, "/. \n");
    if (name[1 + length] == '/') transports_.emplace(name + 1, length);
  }
  std::free(text);
}

Status UcxTransport::Register(std::span<std::byte> memory) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = memory.data();
  params.length = memory.size();
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  ucp_mem_h handle = nullptr;
  const ucs_status_t status = ucp_mem_map(context_, &params, &handle);
  if (status != UCS_OK) return UcxStatus(status, "ucp_mem_map");
  registered_.emplace_back(memory, handle);
  return Status();
}

ucp_mem_h UcxTransport::Registered(std::span<const std::byte> memory) const {
  for (const auto& [region, handle] : registered_) {
    if (memory.data() >= region.data() &&
        memory.data() + memory.size() <= region.data() + region.size()) {
      return handle;
    }
  }
  return nullptr;
}

// ---- connections

Result<Connection*> UcxTransport::Add(ucp_ep_params_t params, bool accepted) {
  auto connection = std::make_unique<Connection>();
  connection->id = next_connection_++;
  connection->token = RandomToken();
  connection->accepted = accepted;
  connection->deadline = SteadyClock().Now() + options_.connect_wait;
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = OnFailed;
  params.err_handler.arg = this;
  const ucs_status_t status = ucp_ep_create(worker_, &params, &connection->endpoint);
  if (status != UCS_OK) return UcxStatus(status, "ucp_ep_create");
  Connection* const added = connection.get();
  by_token_[added->token] = added;
  by_endpoint_[added->endpoint] = added;
  connections_[added->id] = std::move(connection);
  ++changing_;
  if (accepted) ++strangers_;
  return added;
}

Result<ConnectionId> UcxTransport::Connect(const std::string& address) {
  const Result<SocketAddress> to = ParseSocketAddress(address);
  if (!to) return to.error();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr.addr = to->get();
  params.sockaddr.addrlen = to->length;
  const Result<Connection*> connection = Add(params, false);
  if (!connection) return connection.error();
  // It is sent when the endpoints have met.
  const Status greeted = Greet(**connection, false);
  if (!greeted.ok()) Shut(**connection, greeted);
  return (*connection)->id;
}

Status UcxTransport::Greet(Connection& connection, bool answer) {
  Operation* const operation = Begin(connection, Operation::Kind::kHello, 0);
  Hello hello;
  hello.answer = answer ? 1 : 0;
  hello.mine = connection.token;
  hello.yours = connection.remote_token;
  hello.eager = eager_;
  const auto bytes = std::as_bytes(std::span(&hello, 1));
  operation->header.assign(bytes.begin(), bytes.end());
  return Post(operation, kHelloId, {}, UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY);
}

void UcxTransport::Close(ConnectionId id) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second->closing || it->second->leaving) return;
  if (inside_) {
    Leave(*it->second);
  } else {
    Shut(*it->second, Status(Code::kCancelled, "closed here"));
  }
}

// Shuts it when UCX is done with what it does.
void UcxTransport::Leave(Connection& connection) {
  connection.leaving = true;
  Event event;
  event.kind = Event::Kind::kLeft;
  event.connection = connection.id;
  events_.push_back(std::move(event));
}

// Ends everything of it at once; the handler hears of it in Progress.
void UcxTransport::Shut(Connection& connection, Status why) {
  assert(!connection.closing);
  connection.closing = true;
  connection.deadline = SteadyClock().Now() + kEndpointWait;
  connection.why = std::move(why);
  if (connection.open) {
    ++changing_;
  } else if (connection.accepted) {
    --strangers_;
  }
  // What has come and was not delivered is dropped while its endpoint is still there.
  for (auto& [sequence, arrival] : connection.early) Release(arrival);
  connection.early.clear();
  std::vector<Arrival> dropped;
  std::erase_if(events_, [&](Event& event) {
    if (event.kind != Event::Kind::kMessage || event.prefix.token != connection.token) return false;
    dropped.push_back(std::move(event.arrival));
    return true;
  });
  // Not before: letting a rendezvous go sends a message, whose failure may add events.
  for (const Arrival& arrival : dropped) Release(arrival);
  for (Operation* operation : connection.waiting) {
    ucp_am_data_release(worker_, operation->data);
    operation->data = nullptr;
    Event event;
    event.operation = operation;
    event.status = UCS_ERR_CANCELED;
    events_.push_back(std::move(event));
  }
  connection.waiting.clear();
  by_token_.erase(connection.token);
  by_endpoint_.erase(connection.endpoint);
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.cb.send = OnCloseEnd;
  auto* const closing = new std::pair<UcxTransport*, ConnectionId>(this, connection.id);
  param.user_data = closing;
  const ucs_status_ptr_t request = ucp_ep_close_nbx(connection.endpoint, &param);
  connection.endpoint = nullptr;
  if (request == nullptr || UCS_PTR_IS_ERR(request)) {
    delete closing;
    Event event;
    event.kind = Event::Kind::kClosed;
    event.connection = connection.id;
    events_.push_back(std::move(event));
  }
}

void UcxTransport::OnCloseEnd(void* request, ucs_status_t, void* user) {
  const auto* const closing = static_cast<std::pair<UcxTransport*, ConnectionId>*>(user);
  Event event;
  event.kind = Event::Kind::kClosed;
  event.connection = closing->second;
  closing->first->events_.push_back(std::move(event));
  delete closing;
  ucp_request_free(request);
}

void UcxTransport::OnAsked(ucp_conn_request_h request, void* self) {
  Event event;
  event.kind = Event::Kind::kAsked;
  event.request = request;
  static_cast<UcxTransport*>(self)->events_.push_back(std::move(event));
}

void UcxTransport::Asked(ucp_conn_request_h request) {
  if (strangers_ >= kMostStrangers) {
    ucp_listener_reject(listener_, request);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  // An error ends the request, too.
  [[maybe_unused]] const Result<Connection*> connection = Add(params, true);
}

void UcxTransport::OnFailed(void* self, ucp_ep_h endpoint, ucs_status_t status) {
  auto& transport = *static_cast<UcxTransport*>(self);
  const auto it = transport.by_endpoint_.find(endpoint);
  if (it == transport.by_endpoint_.end()) return;
  Event event;
  event.kind = Event::Kind::kFailed;
  event.connection = it->second->id;
  event.status = status;
  transport.events_.push_back(std::move(event));
}

ucs_status_t UcxTransport::OnHello(void* self, const void* header, size_t header_bytes, void*,
                                   size_t, const ucp_am_recv_param_t* param) {
  Event event;
  event.kind = Event::Kind::kHello;
  if (header_bytes != sizeof event.hello ||
      (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) {
    return UCS_OK;
  }
  std::memcpy(&event.hello, header, sizeof event.hello);
  event.endpoint = param->reply_ep;
  static_cast<UcxTransport*>(self)->events_.push_back(std::move(event));
  return UCS_OK;
}

void UcxTransport::Greeted(const Event& event) {
  const Hello& hello = event.hello;
  const auto it = by_endpoint_.find(event.endpoint);
  if (it == by_endpoint_.end() || it->second->leaving) return;
  Connection& connection = *it->second;
  if (hello.magic != kMagic || hello.mine == 0 || connection.open || connection.closing ||
      connection.accepted == (hello.answer != 0) ||
      (hello.answer != 0 && hello.yours != connection.token)) {
    if (!connection.open && !connection.closing) {
      Shut(connection, Status(Code::kInvalidArgument, "the other side does not speak Forebay"));
    }
    return;
  }
  connection.remote_token = hello.mine;
  connection.eager = std::min(eager_, static_cast<size_t>(hello.eager));
  if (connection.accepted) {
    const Status greeted = Greet(connection, true);
    if (!greeted.ok()) {
      Shut(connection, greeted);
      return;
    }
    --strangers_;
  }
  connection.open = true;
  --changing_;
  if (transports_.size() < 4) NoteTransports(connection.endpoint);
  handler_.OnOpen(connection.id, connection.accepted);
}

// ---- messages

Operation* UcxTransport::Begin(Connection& connection, Operation::Kind kind, uint64_t tag) {
  if (free_.empty()) free_.push_back(std::make_unique<Operation>());
  Operation* const operation = free_.back().release();
  free_.pop_back();
  operation->kind = kind;
  operation->transport = this;
  operation->connection = &connection;
  operation->tag = tag;
  operation->at = connection.operations.size();
  connection.operations.push_back(operation);
  return operation;
}

void UcxTransport::Forget(Operation* operation) {
  if (Connection* const connection = operation->connection; connection != nullptr) {
    Operation*& place = connection->operations[operation->at];
    place = connection->operations.back();
    place->at = operation->at;
    connection->operations.pop_back();
  }
  operation->connection = nullptr;
  operation->header.clear();
  operation->place = {};
  free_.emplace_back(operation);
}

Status UcxTransport::Post(Operation* operation, unsigned id, std::span<const std::byte> payload,
                          uint32_t flags) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                       UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.flags = flags;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  param.cb.send = OnSendEnd;
  param.user_data = operation;
  if (!payload.empty()) {
    if (const ucp_mem_h handle = Registered(payload); handle != nullptr) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = handle;
    }
  }
  const ucs_status_ptr_t request =
      ucp_am_send_nbx(operation->connection->endpoint, id, operation->header.data(),
                      operation->header.size(), payload.data(), payload.size(), &param);
  if (UCS_PTR_IS_ERR(request)) {
    Forget(operation);
    return UcxStatus(UCS_PTR_STATUS(request), "ucp_am_send_nbx");
  }
  if (request == nullptr) {
    Event event;
    event.operation = operation;
    events_.push_back(std::move(event));
  }
  return Status();
}

Status UcxTransport::Send(ConnectionId id, std::span<const std::byte> header,
                          std::span<const std::byte> payload, uint64_t tag) {
  if (header.size() > kMaxHeader || payload.size() > kMaxPayload) {
    return Status(Code::kInvalidArgument, StrCat("a message of ", header.size(), " + ",
                                                 payload.size(), " bytes is too large"));
  }
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second->closing || it->second->leaving || !it->second->open) {
    return Status(Code::kNotFound, StrCat("no open connection ", id));
  }
  Connection& connection = *it->second;
  Operation* const operation = Begin(connection, Operation::Kind::kSend, tag);
  const Prefix prefix{connection.remote_token, connection.next_out, 0};
  operation->header.resize(sizeof prefix + header.size());
  std::memcpy(operation->header.data(), &prefix, sizeof prefix);
  std::copy(header.begin(), header.end(), operation->header.begin() + sizeof prefix);
  const Status posted =
      Post(operation, kDataId, payload,
           payload.size() > connection.eager ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER);
  if (posted.ok()) ++connection.next_out;
  return posted;
}

void UcxTransport::OnSendEnd(void* request, ucs_status_t status, void* user) {
  auto* const operation = static_cast<Operation*>(user);
  Event event;
  event.operation = operation;
  event.status = status;
  operation->transport->events_.push_back(std::move(event));
  ucp_request_free(request);
}

void UcxTransport::OnReceiveEnd(void* request, ucs_status_t status, size_t, void* user) {
  OnSendEnd(request, status, user);
}

// Payloads that came with their header are put in their place here: UCX would keep them for later
// only by a copy of its own.
ucs_status_t UcxTransport::OnData(void* self, const void* header, size_t header_bytes, void* data,
                                  size_t length, const ucp_am_recv_param_t* param) {
  auto& transport = *static_cast<UcxTransport*>(self);
  Prefix prefix;
  if (header_bytes < sizeof prefix || header_bytes > sizeof prefix + kMaxHeader ||
      length > kMaxPayload) {
    return UCS_OK;
  }
  std::memcpy(&prefix, header, sizeof prefix);
  const auto it = transport.by_token_.find(prefix.token);
  if (it == transport.by_token_.end()) return UCS_OK;  // of nobody that we know: dropped
  Connection& connection = *it->second;
  const std::span<const std::byte> rest{static_cast<const std::byte*>(header) + sizeof prefix,
                                        header_bytes - sizeof prefix};
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (!rendezvous && length > transport.eager_) {
    // More than we said that we take.
    if (!connection.leaving) transport.Leave(connection);
    return UCS_OK;
  }
  if (!rendezvous && transport.inside_ && connection.open && !connection.leaving &&
      connection.queued == 0 && prefix.sequence == connection.next_in && connection.early.empty()) {
    ++connection.next_in;
    transport.DeliverEager(connection.id, rest, {static_cast<const std::byte*>(data), length});
    return UCS_OK;
  }
  Event event;
  event.kind = Event::Kind::kMessage;
  event.prefix = prefix;
  event.arrival.header.assign(rest.begin(), rest.end());
  event.arrival.length = length;
  if (rendezvous) {
    event.arrival.data = data;
  } else {
    const auto* const bytes = static_cast<const std::byte*>(data);
    event.arrival.payload.assign(bytes, bytes + length);
  }
  ++connection.queued;
  transport.events_.push_back(std::move(event));
  return rendezvous ? UCS_INPROGRESS : UCS_OK;
}

void UcxTransport::Release(const Arrival& arrival) {
  if (arrival.data != nullptr) ucp_am_data_release(worker_, arrival.data);
}

void UcxTransport::Arrived(Event& event) {
  const auto it = by_token_.find(event.prefix.token);
  if (it == by_token_.end()) {
    Release(event.arrival);
    return;
  }
  const ConnectionId id = it->second->id;
  Connection& connection = *it->second;
  --connection.queued;
  // An endpoint that has said no hello does not know its number: `open` holds.
  if (!connection.open || connection.leaving) {
    Release(event.arrival);
    return;
  }
  // Several lanes may bring them out of order.
  if (event.prefix.sequence != connection.next_in) {
    const size_t bytes = event.arrival.payload.size();
    if (connection.early.size() >= kMostEarly || connection.early_bytes + bytes > kMostEarlyBytes) {
      Release(event.arrival);
      Shut(connection, Status(Code::kDataLoss, "a message of the connection is missing"));
      return;
    }
    const auto [place, added] =
        connection.early.try_emplace(event.prefix.sequence, std::move(event.arrival));
    if (added) {
      connection.early_bytes += bytes;
    } else {
      Release(event.arrival);
    }
    return;
  }
  ++connection.next_in;
  Deliver(connection, std::move(event.arrival));
  while (true) {
    // The handler may have closed it.
    const auto again = connections_.find(id);
    if (again == connections_.end() || again->second->closing) return;
    auto& early = again->second->early;
    if (early.empty() || early.begin()->first != again->second->next_in) return;
    Arrival next = std::move(early.begin()->second);
    early.erase(early.begin());
    again->second->early_bytes -= next.payload.size();
    ++again->second->next_in;
    Deliver(*again->second, std::move(next));
  }
}

void UcxTransport::DeliverEager(ConnectionId id, std::span<const std::byte> header,
                                std::span<const std::byte> payload) {
  uint64_t tag = 0;
  const std::span<std::byte> place = handler_.OnMessage(id, header, payload.size(), &tag);
  if (place.empty() || payload.empty()) return;
  assert(place.size() == payload.size());
  handler_.OnCopy(tag, place, payload);
  // If the handler has closed it meanwhile, the bytes are there all the same.
  handler_.OnPayload(id, tag, Status());
}

void UcxTransport::Deliver(Connection& connection, Arrival arrival) {
  if (arrival.data == nullptr) {
    DeliverEager(connection.id, arrival.header, arrival.payload);
    return;
  }
  uint64_t tag = 0;
  const std::span<std::byte> place =
      handler_.OnMessage(connection.id, arrival.header, arrival.length, &tag);
  if (place.empty()) {
    Release(arrival);
    return;
  }
  assert(place.size() == arrival.length);
  if (connection.closing) {
    Release(arrival);
    handler_.OnPayload(connection.id, tag, connection.why);
    return;
  }
  Operation* const operation = Begin(connection, Operation::Kind::kReceive, tag);
  operation->place = place;
  operation->data = arrival.data;
  connection.waiting.push_back(operation);
  Receive(connection);
}

// Begins what may be under way at once.
void UcxTransport::Receive(Connection& connection) {
  while (!connection.waiting.empty()) {
    Operation* const operation = connection.waiting.front();
    const size_t bytes = operation->place.size();
    if (connection.receiving > 0 && connection.receiving + bytes > kMostReceiving) return;
    connection.waiting.pop_front();
    connection.receiving += bytes;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.cb.recv_am = OnReceiveEnd;
    param.user_data = operation;
    if (const ucp_mem_h handle = Registered(operation->place); handle != nullptr) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = handle;
    }
    const ucs_status_ptr_t request = ucp_am_recv_data_nbx(
        worker_, std::exchange(operation->data, nullptr), operation->place.data(), bytes, &param);
    if (request == nullptr || UCS_PTR_IS_ERR(request)) {
      Event event;
      event.operation = operation;
      event.status = request == nullptr ? UCS_OK : UCS_PTR_STATUS(request);
      events_.push_back(std::move(event));
    }
  }
}

void UcxTransport::Ended(Operation* operation, ucs_status_t status) {
  Connection* const connection = operation->connection;
  const Operation::Kind kind = operation->kind;
  const uint64_t tag = operation->tag;
  const size_t bytes = operation->place.size();
  Forget(operation);
  if (connection == nullptr) return;
  if (kind == Operation::Kind::kReceive && !connection->closing) {
    connection->receiving -= bytes;
    Receive(*connection);
  }
  if (kind == Operation::Kind::kHello) return;
  const Status end = status == UCS_OK                 ? Status()
                     : connection->closing            ? connection->why
                     : kind == Operation::Kind::kSend ? UcxStatus(status, "send")
                                                      : UcxStatus(status, "receive");
  if (kind == Operation::Kind::kSend) {
    handler_.OnSent(connection->id, tag, end);
  } else {
    handler_.OnPayload(connection->id, tag, end);
  }
}

// ---- running

void UcxTransport::Dispatch(Event& event) {
  switch (event.kind) {
    case Event::Kind::kAsked:
      Asked(event.request);
      return;
    case Event::Kind::kHello:
      Greeted(event);
      return;
    case Event::Kind::kMessage:
      Arrived(event);
      return;
    case Event::Kind::kEnded:
      Ended(event.operation, event.status);
      return;
    case Event::Kind::kLeft:
    case Event::Kind::kFailed: {
      const auto it = connections_.find(event.connection);
      if (it == connections_.end() || it->second->closing) return;
      Shut(*it->second, event.kind == Event::Kind::kLeft
                            ? Status(Code::kCancelled, "closed here")
                            : UcxStatus(event.status, "the connection was lost"));
      return;
    }
    case Event::Kind::kClosed: {
      const auto it = connections_.find(event.connection);
      if (it == connections_.end()) return;
      it->second->closed = true;
      it->second->deadline = SteadyClock().Now() + kCloseWait;
      return;
    }
  }
}

// Whether a connection whose endpoint UCX does not give back may be ended without it. While a
// payload may still come into the handler's memory it may not: the handler would use the place
// anew.
bool UcxTransport::MayLeave(Connection& connection, Nanos now) {
  if (now < connection.deadline) return false;
  connection.deadline = now + kEndpointWait;
  const bool receiving =
      std::any_of(connection.operations.begin(), connection.operations.end(),
                  [](const Operation* one) { return one->kind == Operation::Kind::kReceive; });
  if (!std::exchange(told_, true)) {
    std::fprintf(stderr, "forebay: UCX has not closed a connection for %d s; %s\n",
                 static_cast<int>(kEndpointWait / kSecond),
                 receiving ? "payloads are on their way, so it is waited for" : "it is left alone");
  }
  return !receiving;
}

// Gives up what does not open in time, and tells the handler of what has ended.
void UcxTransport::Reap() {
  if (changing_ == 0) return;
  const Nanos now = SteadyClock().Now();
  std::vector<ConnectionId> gone;
  for (auto& [id, connection] : connections_) {
    if (!connection->closing) {
      if (!connection->open && now >= connection->deadline) {
        Shut(*connection, Status(Code::kDeadlineExceeded, "no answer to a connection"));
      }
      continue;
    }
    if (!connection->closed && !MayLeave(*connection, now)) continue;
    if (!connection->closed || connection->operations.empty() || now >= connection->deadline)
      gone.push_back(id);
  }
  for (const ConnectionId id : gone) {
    const auto it = connections_.find(id);
    const std::unique_ptr<Connection> connection = std::move(it->second);
    connections_.erase(it);
    --changing_;
    for (Operation* operation : connection->operations) {
      // Its endpoint is gone; should UCX ever end it, nobody listens.
      operation->connection = nullptr;
      if (operation->kind == Operation::Kind::kSend) {
        handler_.OnSent(id, operation->tag, connection->why);
      } else if (operation->kind == Operation::Kind::kReceive) {
        handler_.OnPayload(id, operation->tag, connection->why);
      }
    }
    // A stranger's was never shown to the handler.
    if (connection->open || !connection->accepted) handler_.OnClosed(id, connection->why);
  }
}

bool UcxTransport::Progress() {
  inside_ = true;
  bool more = ucp_worker_progress(worker_) > 0;
  inside_ = false;
  // What the handler does may add to them; those wait for the next call.
  for (size_t count = events_.size(); count > 0 && !events_.empty(); --count) {
    Event event = std::move(events_.front());
    events_.pop_front();
    Dispatch(event);
    more = true;
  }
  Reap();
  return more || !events_.empty();
}

void UcxTransport::Wait(std::span<const int> wake_fds, Nanos wait) {
  if (!events_.empty()) return;
  if (ucp_worker_arm(worker_) != UCS_OK) return;  // there is something to do
  if (changing_ > 0) {
    Nanos next = INT64_MAX;
    for (const auto& [id, connection] : connections_) {
      if (connection->closing || !connection->open) next = std::min(next, connection->deadline);
    }
    if (next != INT64_MAX) wait = std::min(wait, next - SteadyClock().Now());
  }
  constexpr size_t kOwn = 2;
  pollfd few[kOwn + 6];
  std::vector<pollfd> many;
  pollfd* fds = few;
  if (wake_fds.size() + kOwn > std::size(few)) {
    many.resize(wake_fds.size() + kOwn);
    fds = many.data();
  }
  fds[0] = {event_fd_, POLLIN, 0};
  fds[1] = {wake_.get(), POLLIN, 0};
  for (size_t i = 0; i < wake_fds.size(); ++i) fds[kOwn + i] = {wake_fds[i], POLLIN, 0};
  const Nanos bound = std::max<Nanos>(wait, 0);
  const timespec time{bound / kSecond, bound % kSecond};
  ::ppoll(fds, wake_fds.size() + kOwn, &time, nullptr);
  if ((fds[1].revents & POLLIN) != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
  }
}

void UcxTransport::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t wrote = ::write(wake_.get(), &one, sizeof one);
}

std::string Version() {
  unsigned major = 0, minor = 0, release = 0;
  ucp_get_version(&major, &minor, &release);
  return StrCat(major, ".", minor, ".", release);
}

Result<std::unique_ptr<Transport>> MakeTransport(const TransportOptions& options,
                                                 TransportHandler& handler) {
  auto transport = std::make_unique<UcxTransport>(options, handler);
  FOREBAY_RETURN_IF_ERROR(transport->Start());
  return std::unique_ptr<Transport>(std::move(transport));
}

constexpr UcxLibrary kLibrary{kUcxBuild, QuietUcx, Version, MakeTransport};

}  // namespace
}  // namespace forebay

extern "C" __attribute__((visibility("default"))) const forebay::UcxLibrary* ForebayUcxLibrary() {
  return &forebay::kLibrary;
}
