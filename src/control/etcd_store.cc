#include "control/etcd_store.h"

#include <algorithm>
#include <utility>

#include "control/base64.h"

namespace forebay::control {
namespace {

void AppendBytes(std::string_view name, std::string_view bytes, std::string* out) {
  out->push_back('"');
  out->append(name);
  out->append("\":\"");
  AppendBase64(bytes, out);
  out->push_back('"');
}

// etcd ranges over [key, range_end); "\0" stands for the first key, and for no end.
void AppendPrefix(std::string_view prefix, std::string* out) {
  const std::string_view zero("\0", 1);
  const std::string end = PrefixEnd(prefix);
  AppendBytes("key", prefix.empty() ? zero : prefix, out);
  out->push_back(',');
  AppendBytes("range_end", end.empty() ? zero : end, out);
}

// etcd's words, where the user can do something about them: what they mean, and what.
Status Explained(Code code, const std::string& message) {
  struct Known {
    std::string_view words;
    std::string_view remedy;
  };
  static constexpr Known kKnown[] = {
      {"user name is empty",
       "; set FOREBAY_ETCD_USER, and FOREBAY_ETCD_PASSWORD or FOREBAY_ETCD_PASSWORD_FILE"},
      {"authentication failed",
       "; FOREBAY_ETCD_USER, or the password of FOREBAY_ETCD_PASSWORD or "
       "FOREBAY_ETCD_PASSWORD_FILE, is wrong"},
      {"authentication is not enabled",
       "; this etcd serves everybody: have it ask for a password (etcdctl auth enable), or unset "
       "FOREBAY_ETCD_USER"},
      {"permission denied",
       "; grant the user in FOREBAY_ETCD_USER a role that may read and write Forebay's keys"},
  };
  for (const Known& known : kKnown) {
    if (message.find(known.words) == std::string::npos) continue;
    return Status(Code::kPermissionDenied, StrCat(message, known.remedy));
  }
  return Status(code, message);
}

Status FromGrpc(int64_t code, const std::string& message) {
  switch (code) {
    case 1:
      return Status(Code::kCancelled, message);
    case 3:
      return Status(Code::kInvalidArgument, message);
    case 4:
      return Status(Code::kDeadlineExceeded, message);
    case 5:
      return Status(Code::kNotFound, message);
    case 7:
    case 16:
      return Status(Code::kPermissionDenied, message);
    case 8:
      return Status(Code::kResourceExhausted, message);
    case 11:
      return Status(Code::kChanged, message);
    case 12:
      return Status(Code::kUnimplemented, message);
    default:
      return Status(Code::kUnavailable, message);
  }
}

// {"error": text, "code": n} or, in streams, {"error": {"grpc_code": n, "message": text}}.
Status ErrorIn(const JsonValue& answer, int http) {
  const JsonValue* error = answer.Find("error");
  if (error == nullptr) {
    if (http == 200) return Status();
    return Status(Code::kUnavailable, StrCat("HTTP status ", http));
  }
  const JsonValue& where = error->is_object() ? *error : answer;
  const JsonValue* code = where.Find(error->is_object() ? "grpc_code" : "code");
  const JsonValue* message = where.Find("message");
  const std::string text = message != nullptr && message->text() != nullptr ? *message->text()
                           : error->text() != nullptr                       ? *error->text()
                                                                            : error->Write();
  const Status status = FromGrpc(code != nullptr ? code->IntegerOrText().value_or(14) : 14, text);
  return Explained(status.code(), status.message());
}

// Whether a new token may help: etcd does not know this one, or it is older than the rights that it
// was given for.
bool TokenRefused(const JsonValue& answer) {
  const JsonValue* error = answer.Find("error");
  if (error == nullptr || error->text() == nullptr) return false;
  const JsonValue* code = answer.Find("code");
  return (code != nullptr && code->IntegerOrText() == 16) ||
         error->text()->find("auth store is old") != std::string::npos;
}

// An answer that is not etcd's gateway's.
Status NotEtcd(int code, const HttpConnection& connection) {
  // As servers of TLS answer who speaks plain HTTP.
  const bool hint = code == 400 && !connection.tls();
  return Status(Code::kUnavailable,
                StrCat("HTTP status ", code, hint ? "; is it https instead of http?" : ""));
}

struct Reply {
  int http = 0;
  JsonValue json;
};

Result<Reply> Ask(HttpConnection& connection, std::string_view path, std::string_view body,
                  Nanos until) {
  const Result<int> code = connection.Post(path, body, until);
  if (!code) return code.error();
  const Result<std::string> text = connection.WholeBody(until);
  if (!text) return text.error();
  Result<JsonValue> json = JsonValue::Parse(*text);
  if (!json && *code != 200) return NotEtcd(*code, connection);
  if (!json) return Status(Code::kUnavailable, json.error().message());
  return Reply{*code, *std::move(json)};
}

// A token for the user's password.
Result<std::string> Authenticate(HttpConnection& connection, const EtcdAccess& access,
                                 Nanos until) {
  JsonValue body;
  body.Set("name", access.user);
  body.Set("password", access.password);
  connection.SetAuthorization("");
  const Result<Reply> reply = Ask(connection, "/v3/auth/authenticate", body.Write(), until);
  if (!reply) return reply.error();
  FOREBAY_RETURN_IF_ERROR(ErrorIn(reply->json, reply->http));
  const JsonValue* token = reply->json.Find("token");
  const std::string* text = token != nullptr ? token->text() : nullptr;
  // It goes into a header.
  if (text == nullptr || text->empty() || text->size() > 8192 ||
      !std::all_of(text->begin(), text->end(), [](char c) { return c > ' ' && c <= '~'; })) {
    return Status(Code::kUnavailable, "an answer to a password without a token");
  }
  return *text;
}

int64_t Integer(const JsonValue& value, std::string_view name) {
  const JsonValue* member = value.Find(name);
  return member == nullptr ? 0 : member->IntegerOrText().value_or(0);
}

// A missing member is empty: the gateway leaves out what is empty.
Result<std::string> Bytes(const JsonValue& value, std::string_view name) {
  const JsonValue* member = value.Find(name);
  if (member == nullptr) return std::string();
  std::optional<std::string> bytes;
  if (member->text() != nullptr) bytes = FromBase64(*member->text());
  if (!bytes) return Status(Code::kDataLoss, StrCat("'", name, "' in an answer is not base64"));
  return *std::move(bytes);
}

Status ReadEntries(const JsonValue& answer, std::vector<StoreEntry>* out) {
  const JsonValue* kvs = answer.Find("kvs");
  if (kvs == nullptr || kvs->array() == nullptr) return Status();
  out->reserve(kvs->array()->size());
  for (const JsonValue& kv : *kvs->array()) {
    Result<std::string> key = Bytes(kv, "key");
    if (!key) return key.error();
    Result<std::string> value = Bytes(kv, "value");
    if (!value) return value.error();
    out->push_back(
        {*std::move(key), *std::move(value), Integer(kv, "mod_revision"), Integer(kv, "lease")});
  }
  return Status();
}

int64_t Revision(const JsonValue& answer) {
  const JsonValue* header = answer.Find("header");
  return header == nullptr ? 0 : Integer(*header, "revision");
}

void AppendPut(std::string_view key, std::string_view value, LeaseId lease, std::string* out) {
  out->append("{\"request_put\":{");
  AppendBytes("key", key, out);
  out->push_back(',');
  AppendBytes("value", value, out);
  if (lease != 0) out->append(StrCat(",\"lease\":\"", lease, "\""));
  out->append("}}");
}

bool Succeeded(const JsonValue& answer) {
  const JsonValue* succeeded = answer.Find("succeeded");
  return succeeded != nullptr && succeeded->boolean() != nullptr && *succeeded->boolean();
}

Status Named(const Status& status, const HttpEndpoint& endpoint) {
  return Status(status.code(), StrCat("etcd at ", endpoint.ToString(), ": ", status.message()));
}

// Whether another endpoint, or the same one later, may do better.
bool Passing(Code code) { return code == Code::kUnavailable || code == Code::kDeadlineExceeded; }

class EtcdWatch final : public StoreWatch {
 public:
  EtcdWatch(std::vector<HttpEndpoint> endpoints, size_t first, EtcdAccess access, Nanos deadline,
            std::string_view prefix, int64_t next)
      : endpoints_(std::move(endpoints)),
        access_(std::move(access)),
        deadline_(deadline),
        prefix_(prefix),
        next_(next),
        current_(first) {}

  Result<std::vector<StoreEvent>> Poll(Nanos wait) override {
    const Nanos until = SteadyClock().Now() + std::max<Nanos>(0, wait);
    if (connection_ == nullptr) {
      Status status = Open(SteadyClock().Now() + deadline_);
      if (!status.ok()) return Drop(status);
    }
    std::vector<StoreEvent> events;
    while (true) {
      Status status = TakeLines(&events);
      if (!status.ok()) return Drop(status);
      // What came together is given together; nothing of it waits for the next call.
      const Nanos limit = events.empty() ? until : 0;
      Result<std::optional<std::string>> piece = connection_->NextPiece(limit);
      if (!piece) {
        if (piece.error().code() == Code::kDeadlineExceeded || !events.empty()) return events;
        return Drop(piece.error());
      }
      if (!*piece) return Drop(Status(Code::kUnavailable, "the watch was ended"));
      lines_ += **piece;
      if (lines_.size() > HttpAnswer::kMaxBody) {
        return Drop(Status(Code::kUnavailable, "an answer to a watch is too long"));
      }
      // What never is an event keeps nobody here.
      if (events.empty() && SteadyClock().Now() >= until) {
        status = TakeLines(&events);
        return status.ok() ? Result<std::vector<StoreEvent>>(std::move(events)) : Drop(status);
      }
    }
  }

 private:
  Status Open(Nanos until) {
    Result<std::unique_ptr<HttpConnection>> connection =
        HttpConnection::Connect(endpoints_[current_], access_.Tls(), until);
    if (!connection) return connection.error();
    // A token of its own each time: etcd asks for one when a watch begins, and never again.
    if (!access_.user.empty()) {
      Result<std::string> token = Authenticate(**connection, access_, until);
      if (!token) return token.error();
      (*connection)->SetAuthorization(*std::move(token));
    }
    lines_.clear();
    std::string body = "{\"create_request\":{";
    AppendPrefix(prefix_, &body);
    body += StrCat(",\"start_revision\":\"", next_, "\"}}");
    const Result<int> code = (*connection)->Post("/v3/watch", body, until);
    if (!code) return code.error();
    if (*code != 200) return NotEtcd(*code, **connection);
    connection_ = *std::move(connection);
    return Status();
  }

  // Answers are JSON values with a line break after each.
  Status TakeLines(std::vector<StoreEvent>* events) {
    size_t begin = 0;
    Status status;
    while (status.ok()) {
      const size_t end = lines_.find('\n', begin);
      if (end == std::string::npos) break;
      status = TakeLine(std::string_view(lines_).substr(begin, end - begin), events);
      begin = end + 1;
    }
    lines_.erase(0, begin);
    return status;
  }

  Status TakeLine(std::string_view line, std::vector<StoreEvent>* events) {
    const Result<JsonValue> answer = JsonValue::Parse(line);
    if (!answer) return Status(Code::kUnavailable, answer.error().message());
    FOREBAY_RETURN_IF_ERROR(ErrorIn(*answer, 200));
    const JsonValue* result = answer->Find("result");
    if (result == nullptr) return Status();
    if (Integer(*result, "compact_revision") > 0) {
      return Status(Code::kChanged, StrCat("events from revision ", next_, " on are compacted"));
    }
    if (const JsonValue* canceled = result->Find("canceled");
        canceled != nullptr && canceled->boolean() != nullptr && *canceled->boolean()) {
      const JsonValue* reason = result->Find("cancel_reason");
      return Explained(Code::kUnavailable,
                       reason != nullptr && reason->text() != nullptr
                           ? StrCat("the watch was cancelled: ", *reason->text())
                           : "the watch was cancelled");
    }
    const JsonValue* list = result->Find("events");
    if (list == nullptr || list->array() == nullptr) return Status();
    for (const JsonValue& event : *list->array()) {
      const JsonValue* kv = event.Find("kv");
      if (kv == nullptr) continue;
      StoreEvent& out = events->emplace_back();
      Result<std::string> key = Bytes(*kv, "key");
      if (!key) return key.error();
      out.key = *std::move(key);
      out.revision = Integer(*kv, "mod_revision");
      next_ = std::max(next_, out.revision + 1);
      const JsonValue* type = event.Find("type");
      if (type != nullptr && type->text() != nullptr && *type->text() == "DELETE") continue;
      Result<std::string> value = Bytes(*kv, "value");
      if (!value) return value.error();
      out.value = *std::move(value);
    }
    return Status();
  }

  Status Drop(const Status& status) {
    const Status named = Named(status, endpoints_[current_]);
    connection_.reset();
    current_ = (current_ + 1) % endpoints_.size();
    return named;
  }

  const std::vector<HttpEndpoint> endpoints_;
  const EtcdAccess access_;
  const Nanos deadline_;
  const std::string prefix_;
  int64_t next_;
  size_t current_;
  std::unique_ptr<HttpConnection> connection_;
  std::string lines_;
};

}  // namespace

Status EtcdOptions::Validate() const {
  if (endpoints.empty()) {
    return Status(Code::kInvalidArgument, "no etcd endpoint is named; write https://host:port");
  }
  for (const std::string& endpoint : endpoints) {
    const Result<HttpEndpoint> parsed = HttpEndpoint::Parse(endpoint);
    if (!parsed) return parsed.error();
    // That its files can be used, and that this build has TLS.
    if (parsed->tls) FOREBAY_RETURN_IF_ERROR(tcp::MakeTlsClient(access.Tls()).status());
  }
  if (deadline <= 0) return Status(Code::kInvalidArgument, "the deadline must be above 0");
  if (max_txn_ops < 1 || max_txn_bytes < 1) {
    return Status(Code::kInvalidArgument, "a transaction must have room for one operation");
  }
  return Status();
}

Result<std::unique_ptr<EtcdStore>> EtcdStore::Make(EtcdOptions options) {
  FOREBAY_RETURN_IF_ERROR(options.Validate());
  std::vector<HttpEndpoint> endpoints;
  for (const std::string& text : options.endpoints) {
    endpoints.push_back(*HttpEndpoint::Parse(text));
  }
  return std::unique_ptr<EtcdStore>(new EtcdStore(std::move(options), std::move(endpoints)));
}

Result<std::unique_ptr<EtcdStore>> EtcdStore::Open(std::vector<std::string> endpoints,
                                                   Nanos deadline) {
  Result<EtcdAccess> access = EtcdAccess::FromEnvironment();
  if (!access) return access.error();
  EtcdOptions options;
  options.endpoints = std::move(endpoints);
  options.access = *std::move(access);
  options.deadline = deadline;
  return Make(std::move(options));
}

std::string EtcdStore::Describe() const {
  return StrCat("etcd at ", endpoints_[current_].ToString());
}

std::string EtcdStore::Warning() const {
  if (options_.access.user.empty()) return "";
  for (const HttpEndpoint& endpoint : endpoints_) {
    if (endpoint.tls || endpoint.loopback()) continue;
    return StrCat("the password for etcd goes to ", endpoint.ToString(),
                  " in plain text; whoever listens can read it: name etcd by https://");
  }
  return "";
}

Result<JsonValue> EtcdStore::Try(std::string_view path, std::string_view body, Nanos until) {
  const bool kept = connection_ != nullptr;
  if (!kept) {
    Result<std::unique_ptr<HttpConnection>> made =
        HttpConnection::Connect(endpoints_[current_], options_.access.Tls(), until);
    if (!made) return made.error();
    connection_ = *std::move(made);
  }
  const bool authenticates = !options_.access.user.empty() && token_.empty();
  if (authenticates) {
    Result<std::string> token = Authenticate(*connection_, options_.access, until);
    if (!token || !connection_->reusable()) connection_.reset();
    if (!token) return token.error();
    token_ = *std::move(token);
    if (connection_ == nullptr) return Try(path, body, until);
  }
  connection_->SetAuthorization(token_);
  Result<Reply> reply = Ask(*connection_, path, body, until);
  if (!reply) {
    const bool idle_closed = kept && !connection_->answered() && Passing(reply.error().code()) &&
                             reply.error().code() != Code::kDeadlineExceeded;
    connection_.reset();
    return idle_closed ? Try(path, body, until) : Result<JsonValue>(reply.error());
  }
  if (!connection_->reusable()) connection_.reset();
  if (!token_.empty() && TokenRefused(reply->json)) {
    token_.clear();
    if (!authenticates) return Try(path, body, until);
  }
  FOREBAY_RETURN_IF_ERROR(ErrorIn(reply->json, reply->http));
  return std::move(reply->json);
}

Result<JsonValue> EtcdStore::Call(std::string_view path, std::string_view body) {
  const Nanos until = SteadyClock().Now() + options_.deadline;
  Status last;
  for (size_t tried = 0; tried < endpoints_.size(); ++tried) {
    // A silent endpoint leaves time for the others.
    const Nanos now = SteadyClock().Now();
    const Nanos part = (until - now) / static_cast<Nanos>(endpoints_.size() - tried);
    if (part <= 0) break;
    Result<JsonValue> answer = Try(path, body, now + part);
    if (answer) return answer;
    last = Named(answer.error(), endpoints_[current_]);
    if (!Passing(answer.error().code())) break;
    connection_.reset();
    current_ = (current_ + 1) % endpoints_.size();
  }
  return last;
}

Status EtcdStore::PutMany(std::span<const StoreWrite> writes, const Fence* fence) {
  std::string head = "{";
  if (fence) {
    head += "\"compare\":[{\"result\":\"EQUAL\",\"target\":\"LEASE\",";
    AppendBytes("key", fence->election, &head);
    head += StrCat(",\"lease\":\"", fence->lease, "\"}],");
  }
  head += "\"success\":[";
  size_t next = 0;
  do {
    std::string body = head;
    size_t count = 0;
    size_t bytes = 0;
    while (next < writes.size() && count < options_.max_txn_ops) {
      const StoreWrite& write = writes[next];
      bytes += write.key.size() + write.value.size() + 32;
      if (count > 0 && bytes > options_.max_txn_bytes) break;
      if (count > 0) body.push_back(',');
      AppendPut(write.key, write.value, write.lease, &body);
      ++count;
      ++next;
    }
    if (count == 0 && !fence) break;
    body += "]}";
    const Result<JsonValue> answer = Call("/v3/kv/txn", body);
    if (!answer) return answer.error();
    if (fence && !Succeeded(*answer)) {
      return Status(Code::kCancelled, StrCat(fence->election, " is led by another"));
    }
  } while (next < writes.size());
  return Status();
}

Result<StoreSnapshot> EtcdStore::Range(std::string_view prefix) {
  std::string body = "{";
  AppendPrefix(prefix, &body);
  body += "}";
  const Result<JsonValue> answer = Call("/v3/kv/range", body);
  if (!answer) return answer.error();
  StoreSnapshot snapshot;
  snapshot.revision = Revision(*answer);
  Status status = ReadEntries(*answer, &snapshot.entries);
  if (!status.ok()) return Named(status, endpoints_[current_]);
  return snapshot;
}

Status EtcdStore::Delete(std::string_view key) {
  std::string body = "{";
  AppendBytes("key", key, &body);
  body += "}";
  return Call("/v3/kv/deleterange", body).status();
}

Result<LeaseId> EtcdStore::GrantLease(Nanos ttl) {
  const Nanos seconds = std::max<Nanos>(1, (ttl + kSecond - 1) / kSecond);
  const Result<JsonValue> answer = Call("/v3/lease/grant", StrCat("{\"TTL\":\"", seconds, "\"}"));
  if (!answer) return answer.error();
  const LeaseId lease = Integer(*answer, "ID");
  if (lease == 0) {
    return Named(Status(Code::kUnavailable, "a lease without a number"), endpoints_[current_]);
  }
  return lease;
}

Status EtcdStore::KeepAlive(LeaseId lease) {
  const Result<JsonValue> answer = Call("/v3/lease/keepalive", StrCat("{\"ID\":\"", lease, "\"}"));
  if (!answer) return answer.error();
  const JsonValue* result = answer->Find("result");
  if (result == nullptr || Integer(*result, "TTL") <= 0) {
    return Named(Status(Code::kNotFound, StrCat("lease ", lease, " has ended")),
                 endpoints_[current_]);
  }
  return Status();
}

Status EtcdStore::Revoke(LeaseId lease) {
  Status status = Call("/v3/lease/revoke", StrCat("{\"ID\":\"", lease, "\"}")).status();
  return status.code() == Code::kNotFound ? Status() : status;
}

Result<std::unique_ptr<StoreWatch>> EtcdStore::Watch(std::string_view prefix, int64_t revision) {
  return std::unique_ptr<StoreWatch>(std::make_unique<EtcdWatch>(
      endpoints_, current_, options_.access, options_.deadline, prefix, revision));
}

Result<Leadership> EtcdStore::Campaign(std::string_view election, std::string_view name,
                                       LeaseId lease) {
  if (lease == 0) return Status(Code::kInvalidArgument, "a campaign needs a lease");
  std::string body = "{\"compare\":[{\"result\":\"EQUAL\",\"target\":\"CREATE\",";
  AppendBytes("key", election, &body);
  body += ",\"create_revision\":\"0\"}],\"success\":[";
  AppendPut(election, name, lease, &body);
  body += "],\"failure\":[{\"request_range\":{";
  AppendBytes("key", election, &body);
  body += "}}]}";
  const Result<JsonValue> answer = Call("/v3/kv/txn", body);
  if (!answer) return answer.error();
  if (Succeeded(*answer)) return Leadership{std::string(name), lease};
  const JsonValue* responses = answer->Find("responses");
  std::vector<StoreEntry> entries;
  if (responses != nullptr && responses->array() != nullptr && !responses->array()->empty()) {
    const JsonValue* range = responses->array()->front().Find("response_range");
    if (range != nullptr) FOREBAY_RETURN_IF_ERROR(ReadEntries(*range, &entries));
  }
  if (entries.empty()) {
    return Named(Status(Code::kUnavailable, "no answer to a campaign"), endpoints_[current_]);
  }
  return Leadership{entries[0].value, entries[0].lease};
}

Result<std::optional<Leadership>> EtcdStore::Leader(std::string_view election) {
  std::string body = "{";
  AppendBytes("key", election, &body);
  body += "}";
  const Result<JsonValue> answer = Call("/v3/kv/range", body);
  if (!answer) return answer.error();
  std::vector<StoreEntry> entries;
  FOREBAY_RETURN_IF_ERROR(ReadEntries(*answer, &entries));
  if (entries.empty()) return std::optional<Leadership>();
  return std::optional<Leadership>({entries[0].value, entries[0].lease});
}

Status EtcdStore::Compact(int64_t revision) {
  // etcd serves watches from a compacted revision on.
  const Status status =
      Call("/v3/kv/compaction", StrCat("{\"revision\":\"", revision, "\"}")).status();
  return status.code() == Code::kChanged ? Status() : status;
}

}  // namespace forebay::control
