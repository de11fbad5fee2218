// TLS by OpenSSL 3.
//
// Between nodes: TLS 1.3 with an external pre-shared key and a fresh Diffie-Hellman exchange. Who
// does not have the key gets no further than a refusal, and who learns it later cannot read what
// was recorded before. There are no certificates, and a side that shows one is not believed.
// To servers (tls_client.h): by certificates.
//
// OpenSSL writes each record, 16 KiB, by a call of its own. Its records are gathered here and go
// out many at once; where the kernel encrypts, they go to the socket directly.
#include "transport/tcp_stream.h"
#include "transport/tls_client.h"

#ifdef FOREBAY_HAVE_OPENSSL

#include <arpa/inet.h>

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

namespace forebay::tcp {
namespace {

constexpr char kIdentity[] = "forebay";
// TLS_AES_128_GCM_SHA256.
constexpr unsigned char kCipher[] = {0x13, 0x01};
constexpr size_t kGather = 256 << 10;
constexpr size_t kReadBuffer = 128 << 10;

std::string OpenSslError(std::string_view what) {
  const unsigned long code = ERR_peek_last_error();
  const char* const reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return StrCat("TLS: ", what, reason != nullptr ? ": " : "", reason != nullptr ? reason : "");
}

struct Freed {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(BIO_METHOD* method) const { BIO_meth_free(method); }
};

// Records on their way out of one connection.
struct Gathered {
  int fd = -1;
  std::vector<char> bytes;
  size_t begin = 0;

  bool empty() const { return begin == bytes.size(); }
  // 0, or -errno.
  int Flush() {
    while (!empty()) {
      const ssize_t sent = ::send(fd, bytes.data() + begin, bytes.size() - begin, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return -errno;
      begin += static_cast<size_t>(sent);
    }
    bytes.clear();
    begin = 0;
    return 0;
  }
};

// OpenSSL's own writes to a socket raise SIGPIPE where the other side is gone: it is kept from the
// program. Ours do not.
class NoSigpipe {
 public:
  explicit NoSigpipe(bool active) : active_(active) {
    if (!active_) return;
    sigset_t pending;
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoSigpipe() {
    if (!active_) return;
    const int error = errno;
    const timespec now{0, 0};
    while (!was_pending_ && ::sigtimedwait(&pipe_, nullptr, &now) < 0 && errno == EINTR) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  const bool active_;
  bool was_pending_ = false;
  sigset_t pipe_, before_;
};

int BioWrite(BIO* bio, const char* data, int size) {
  BIO_clear_retry_flags(bio);
  auto* const gathered = static_cast<Gathered*>(BIO_get_data(bio));
  if (gathered->bytes.size() >= kGather && gathered->Flush() != 0 &&
      gathered->bytes.size() - gathered->begin >= kGather) {
    BIO_set_retry_write(bio);
    return -1;
  }
  gathered->bytes.insert(gathered->bytes.end(), data, data + size);
  return size;
}

int BioRead(BIO* bio, char* data, int size) {
  BIO_clear_retry_flags(bio);
  const auto* const gathered = static_cast<Gathered*>(BIO_get_data(bio));
  while (true) {
    const ssize_t got = ::recv(gathered->fd, data, static_cast<size_t>(size), 0);
    if (got >= 0) return static_cast<int>(got);
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) BIO_set_retry_read(bio);
    return -1;
  }
}

long BioControl(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

std::unique_ptr<BIO_METHOD, Freed> GatheringMethod() {
  std::unique_ptr<BIO_METHOD, Freed> method(
      BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "forebay"));
  if (method == nullptr || BIO_meth_set_write(method.get(), BioWrite) != 1 ||
      BIO_meth_set_read(method.get(), BioRead) != 1 ||
      BIO_meth_set_ctrl(method.get(), BioControl) != 1) {
    return nullptr;
  }
  return method;
}

// How the other side shows who it is.
struct Proof {
  enum class Kind : uint8_t { kSharedKey, kCertificate } kind = Kind::kSharedKey;
  // kCertificate.
  std::string host;
  TlsClientOptions options;
};

class TlsStream final : public TlsClientStream {
 public:
  TlsStream(std::unique_ptr<SSL, Freed> ssl, std::unique_ptr<Gathered> gathered, bool kernel,
            Proof proof)
      : ssl_(std::move(ssl)),
        gathered_(std::move(gathered)),
        kernel_(kernel),
        proof_(std::move(proof)) {}

  ssize_t Handshake() override {
    const NoSigpipe guard(kernel_);
    ERR_clear_error();
    errno = 0;
    const int ok = SSL_do_handshake(ssl_.get());
    ssize_t end = ok == 1 ? 0 : Failed("handshake", ok);
    const bool refused = end == -ECONNRESET && proof_.kind == Proof::Kind::kCertificate;
    if ((end == 0 && ok != 1) || refused) {
      end = -ECONNRESET;
      error_ = "TLS: the connection was closed as it began; is it http instead of https?";
    }
    const int flushed = gathered_->Flush();
    if (end != 0 && end != -EAGAIN) return end;
    if (flushed != 0) return flushed;
    if (end == 0 && !Proven()) return -EPROTO;
    return end;
  }

  ssize_t Read(std::span<const iovec> to) override {
    const NoSigpipe guard(kernel_);
    size_t total = 0;
    for (const iovec& piece : to) {
      size_t filled = 0;
      while (filled < piece.iov_len) {
        ERR_clear_error();
        size_t got = 0;
        const int ok = SSL_read_ex(ssl_.get(), static_cast<char*>(piece.iov_base) + filled,
                                   piece.iov_len - filled, &got);
        if (ok != 1) {
          const ssize_t end = Failed("receive", ok);
          const int flushed = gathered_->Flush();  // what the handshake, or an alert, has to say
          if (total > 0) return static_cast<ssize_t>(total);
          return end == -EAGAIN && flushed != 0 && flushed != -EAGAIN ? flushed : end;
        }
        if (!Proven()) return -EPROTO;
        filled += got;
        total += got;
      }
    }
    return static_cast<ssize_t>(total);
  }

  ssize_t Write(std::span<const iovec> from) override {
    const NoSigpipe guard(kernel_);
    size_t total = 0;
    ssize_t end = 0;
    for (const iovec& piece : from) {
      size_t done = 0;
      while (done < piece.iov_len && end == 0) {
        if (gathered_->bytes.size() >= kGather) {
          end = gathered_->Flush();
          if (end != 0) break;
        }
        ERR_clear_error();
        size_t wrote = 0;
        const int ok = SSL_write_ex(ssl_.get(), static_cast<const char*>(piece.iov_base) + done,
                                    std::min(piece.iov_len - done, kGather), &wrote);
        if (ok != 1) {
          end = Failed("send", ok);
        } else if (!Proven()) {
          return -EPROTO;
        }
        done += wrote;
        total += wrote;
      }
      if (end != 0) break;
    }
    const int flushed = gathered_->Flush();
    if (flushed != 0 && flushed != -EAGAIN) return flushed;
    if (total > 0) return static_cast<ssize_t>(total);
    return end != 0 ? end : flushed;
  }

  bool pending() const override { return !gathered_->empty(); }
  std::string error() const override { return error_; }

 private:
  // That a handshake ended says that the other side has the key only if the key was used.
  bool Proven() {
    if (proven_) return true;
    if (proof_.kind == Proof::Kind::kCertificate) {
      proven_ = SSL_is_init_finished(ssl_.get()) == 1 &&
                SSL_get0_peer_certificate(ssl_.get()) != nullptr &&
                SSL_get_verify_result(ssl_.get()) == X509_V_OK;
      if (!proven_) error_ = "TLS: the server showed no certificate";
      return proven_;
    }
    if (SSL_session_reused(ssl_.get()) == 1) return proven_ = true;
    error_ = "TLS: the other side does not have the job's secret";
    return false;
  }

  ssize_t Failed(std::string_view what, int result) {
    switch (SSL_get_error(ssl_.get(), result)) {
      case SSL_ERROR_WANT_READ:
      case SSL_ERROR_WANT_WRITE:
        return -EAGAIN;
      case SSL_ERROR_ZERO_RETURN:
        return 0;
      case SSL_ERROR_SYSCALL:
        return errno != 0 ? -errno : 0;
      default:
        if (ERR_GET_REASON(ERR_peek_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING) return 0;
        error_ = proof_.kind == Proof::Kind::kCertificate
                     ? WhyNotProven(what)
                     : OpenSslError(proven_ ? what : "no agreement; is the job's secret the same?");
        return -EPROTO;
    }
  }

  // By certificates: the reason and its remedy.
  std::string WhyNotProven(std::string_view what) const {
    const TlsClientOptions& options = proof_.options;
    const long verified = SSL_get_verify_result(ssl_.get());
    switch (verified) {
      case X509_V_OK:
        break;
      case X509_V_ERR_HOSTNAME_MISMATCH:
      case X509_V_ERR_IP_ADDRESS_MISMATCH:
        return StrCat("TLS: the server's certificate is not for ", proof_.host,
                      "; name the server as its certificate does");
      case X509_V_ERR_CERT_HAS_EXPIRED:
      case X509_V_ERR_CERT_NOT_YET_VALID:
        return StrCat("TLS: ", X509_verify_cert_error_string(verified),
                      " (the server's); renew it, or set this machine's clock");
      default:
        return StrCat(
            "TLS: the server's certificate is not trusted (",
            X509_verify_cert_error_string(verified), "); set ", options.ca_setting,
            " to a file with its authority's certificate",
            options.ca_file.empty() ? "" : StrCat(", which ", options.ca_file, " does not have"));
    }
    switch (ERR_GET_REASON(ERR_peek_error())) {
      case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
      case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
      case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
      case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
      case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
        if (options.cert_file.empty()) {
          return StrCat(OpenSslError("the server wants a client certificate"), "; set ",
                        options.cert_setting, " and ", options.key_setting);
        }
        return StrCat(OpenSslError("the server refuses the client certificate "), " (",
                      options.cert_file, "); set ", options.cert_setting,
                      " to one that its authority has signed and that is valid");
      case SSL_R_WRONG_VERSION_NUMBER:
      case SSL_R_HTTP_REQUEST:
        return "TLS: no TLS answers at this port; is it http instead of https?";
      default:
        return OpenSslError(what);
    }
  }

  const std::unique_ptr<SSL, Freed> ssl_;
  const std::unique_ptr<Gathered> gathered_;
  const bool kernel_;
  const Proof proof_;
  bool proven_ = false;
  std::string error_;
};

class TlsStreams final : public StreamMaker {
 public:
  static Result<std::unique_ptr<StreamMaker>> Make(const std::string& key, bool kernel) {
    if (key.size() != 32) {
      return Status(Code::kInvalidArgument, "TLS needs a key of 32 bytes");
    }
    auto made = std::make_unique<TlsStreams>();
    made->key_ = key;
    made->kernel_ = kernel;
    made->context_.reset(SSL_CTX_new(TLS_method()));
    made->method_ = GatheringMethod();
    SSL_CTX* const context = made->context_.get();
    if (context == nullptr || made->method_ == nullptr ||
        SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") != 1 ||
        SSL_CTX_set_num_tickets(context, 0) != 1) {
      return Status(Code::kUnavailable, OpenSslError("OpenSSL"));
    }
    SSL_CTX_set_options(
        context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | (kernel ? SSL_OP_ENABLE_KTLS : 0));
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    if (!kernel) {
      SSL_CTX_set_read_ahead(context, 1);
      SSL_CTX_set_default_read_buffer_len(context, kReadBuffer);
    }
    SSL_CTX_set_psk_use_session_callback(context, UseKey);
    SSL_CTX_set_psk_find_session_callback(context, FindKey);
    return std::unique_ptr<StreamMaker>(std::move(made));
  }
  ~TlsStreams() override { OPENSSL_cleanse(key_.data(), key_.size()); }

  Result<std::unique_ptr<Stream>> Make(int fd, Role role) override {
    std::unique_ptr<SSL, Freed> ssl(SSL_new(context_.get()));
    auto gathered = std::make_unique<Gathered>();
    gathered->fd = fd;
    BIO* const bio = kernel_ ? BIO_new_socket(fd, BIO_NOCLOSE) : BIO_new(method_.get());
    if (ssl == nullptr || bio == nullptr) {
      BIO_free(bio);
      return Status(Code::kResourceExhausted, OpenSslError("a connection"));
    }
    if (!kernel_) {
      BIO_set_data(bio, gathered.get());
      BIO_set_init(bio, 1);
    }
    SSL_set_bio(ssl.get(), bio, bio);
    SSL_set_app_data(ssl.get(), this);
    if (role == Role::kConnected) {
      // No certificate is believed: there is no authority.
      SSL_set_verify(ssl.get(), SSL_VERIFY_PEER, nullptr);
      SSL_set_connect_state(ssl.get());
    } else {
      SSL_set_accept_state(ssl.get());
    }
    return std::unique_ptr<Stream>(
        std::make_unique<TlsStream>(std::move(ssl), std::move(gathered), kernel_, Proof()));
  }

  std::string Describe() const override {
    return StrCat("tls 1.3, OpenSSL ", OpenSSL_version(OPENSSL_VERSION_STRING),
                  kernel_ ? ", by the kernel" : "");
  }

 private:
  SSL_SESSION* Session(SSL* ssl) const {
    SSL_SESSION* const session = SSL_SESSION_new();
    const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kCipher);
    if (session != nullptr && cipher != nullptr &&
        SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key_.data()),
                                    key_.size()) == 1 &&
        SSL_SESSION_set_cipher(session, cipher) == 1 &&
        SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
      return session;
    }
    SSL_SESSION_free(session);
    return nullptr;
  }
  static const TlsStreams& Of(SSL* ssl) {
    return *static_cast<const TlsStreams*>(SSL_get_app_data(ssl));
  }
  static int UseKey(SSL* ssl, const EVP_MD* digest, const unsigned char** identity, size_t* size,
                    SSL_SESSION** session) {
    static_cast<void>(digest);
    *identity = reinterpret_cast<const unsigned char*>(kIdentity);
    *size = sizeof kIdentity - 1;
    *session = Of(ssl).Session(ssl);
    return *session != nullptr ? 1 : 0;
  }
  static int FindKey(SSL* ssl, const unsigned char* identity, size_t size, SSL_SESSION** session) {
    *session = nullptr;
    if (size == sizeof kIdentity - 1 && std::memcmp(identity, kIdentity, size) == 0) {
      *session = Of(ssl).Session(ssl);
    }
    return 1;
  }

  std::string key_;
  bool kernel_ = false;
  std::unique_ptr<SSL_CTX, Freed> context_;
  std::unique_ptr<BIO_METHOD, Freed> method_;
};

class CertificateClient final : public TlsClient {
 public:
  static Result<std::unique_ptr<TlsClient>> Make(const TlsClientOptions& options) {
    auto made = std::make_unique<CertificateClient>();
    made->options_ = options;
    ERR_clear_error();
    made->context_.reset(SSL_CTX_new(TLS_client_method()));
    made->method_ = GatheringMethod();
    SSL_CTX* const context = made->context_.get();
    if (context == nullptr || made->method_ == nullptr ||
        SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) != 1) {
      return Status(Code::kUnavailable, OpenSslError("OpenSSL"));
    }
    SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
    // A key with a password is an error, not a question at the terminal.
    SSL_CTX_set_default_passwd_cb(context, [](char*, int, int, void*) { return -1; });
    FOREBAY_RETURN_IF_ERROR(Authorities(context, options));
    FOREBAY_RETURN_IF_ERROR(OwnCertificate(context, options));
    return std::unique_ptr<TlsClient>(std::move(made));
  }

  Result<std::unique_ptr<TlsClientStream>> Make(int fd, const std::string& host) override {
    std::unique_ptr<SSL, Freed> ssl(SSL_new(context_.get()));
    auto gathered = std::make_unique<Gathered>();
    gathered->fd = fd;
    BIO* const bio = BIO_new(method_.get());
    if (ssl == nullptr || bio == nullptr) {
      BIO_free(bio);
      return Status(Code::kResourceExhausted, OpenSslError("a connection"));
    }
    BIO_set_data(bio, gathered.get());
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl.get(), bio, bio);
    in6_addr address = {};
    const bool numeric = ::inet_pton(AF_INET, host.c_str(), &address) == 1 ||
                         ::inet_pton(AF_INET6, host.c_str(), &address) == 1;
    SSL_set_hostflags(ssl.get(), X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    // The name is asked for only where it is one.
    const bool named =
        numeric ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str()) == 1
                : SSL_set1_host(ssl.get(), host.c_str()) == 1 &&
                      SSL_set_tlsext_host_name(ssl.get(), host.c_str()) == 1;
    if (host.empty() || !named) return Status(Code::kInvalidArgument, OpenSslError(host));
    SSL_set_connect_state(ssl.get());
    return std::unique_ptr<TlsClientStream>(
        std::make_unique<TlsStream>(std::move(ssl), std::move(gathered), false,
                                    Proof{Proof::Kind::kCertificate, host, options_}));
  }

 private:
  static Status Unusable(std::string_view setting, const std::string& path,
                         std::string_view wanted) {
    struct stat st = {};
    if (::stat(path.c_str(), &st) != 0) return ErrnoStatus(errno, StrCat(setting, " ", path));
    return Status(Code::kInvalidArgument,
                  StrCat(setting, " ", path, " ", wanted, " (", OpenSslError("PEM"), ")"));
  }
  static Status Authorities(SSL_CTX* context, const TlsClientOptions& options) {
    if (options.ca_file.empty()) {
      if (SSL_CTX_set_default_verify_paths(context) == 1) return Status();
      return Status(Code::kUnavailable, OpenSslError("the system's certificates"));
    }
    if (SSL_CTX_load_verify_file(context, options.ca_file.c_str()) == 1) return Status();
    return Unusable(options.ca_setting, options.ca_file, "has no certificate that can be used");
  }
  static Status OwnCertificate(SSL_CTX* context, const TlsClientOptions& options) {
    if (options.cert_file.empty() != options.key_file.empty()) {
      return Status(Code::kInvalidArgument, StrCat(options.cert_setting, " and ",
                                                   options.key_setting, " go together; set both"));
    }
    if (options.cert_file.empty()) return Status();
    if (SSL_CTX_use_certificate_chain_file(context, options.cert_file.c_str()) != 1) {
      return Unusable(options.cert_setting, options.cert_file,
                      "has no certificate that can be used");
    }
    struct stat st = {};
    if (::stat(options.key_file.c_str(), &st) == 0 && (st.st_mode & (S_IROTH | S_IWOTH)) != 0) {
      return Status(Code::kPermissionDenied,
                    StrCat(options.key_setting, " ", options.key_file,
                           " can be read by others; chmod 600 ", options.key_file));
    }
    if (SSL_CTX_use_PrivateKey_file(context, options.key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
      return Unusable(options.key_setting, options.key_file,
                      StrCat("is not the key of ", options.cert_file,
                             " in PEM, or has a password, which cannot be given"));
    }
    return Status();
  }

  TlsClientOptions options_;
  std::unique_ptr<SSL_CTX, Freed> context_;
  std::unique_ptr<BIO_METHOD, Freed> method_;
};

}  // namespace

Result<std::unique_ptr<TlsClient>> MakeTlsClient(const TlsClientOptions& options) {
  return CertificateClient::Make(options);
}

Result<std::unique_ptr<StreamMaker>> MakeTlsStreams(const std::string& key, bool kernel) {
  return TlsStreams::Make(key, kernel);
}

bool KernelHasTls() {
  std::ifstream in("/proc/sys/net/ipv4/tcp_available_ulp");
  std::string name;
  while (in >> name) {
    if (name == "tls") return true;
  }
  return false;
}

}  // namespace forebay::tcp

namespace forebay {

Result<std::string> TlsVersion() {
  return StrCat("OpenSSL ", OpenSSL_version(OPENSSL_VERSION_STRING));
}

}  // namespace forebay

#else  // no OpenSSL

namespace forebay {
namespace {

Status Missing() {
  return Status(Code::kUnavailable,
                "this Forebay has no TLS: build it where libssl-dev (OpenSSL 3) is, or set "
                "FOREBAY_PEER_TRANSPORT=tcp");
}

}  // namespace

Result<std::string> TlsVersion() { return Missing(); }

namespace tcp {

Result<std::unique_ptr<StreamMaker>> MakeTlsStreams(const std::string&, bool) { return Missing(); }
bool KernelHasTls() { return false; }
Result<std::unique_ptr<TlsClient>> MakeTlsClient(const TlsClientOptions&) {
  return Status(Code::kUnimplemented,
                "this Forebay has no TLS: build it where libssl-dev (OpenSSL 3) is, or reach the "
                "server by http://");
}

}  // namespace tcp
}  // namespace forebay

#endif
