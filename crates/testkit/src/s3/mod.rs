//! A real object store over a directory, which checks signatures.

mod troubled;

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use s3s::Body;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

pub use troubled::{Trouble, Troubled};

/// A server at a port of this host, with threads of its own. It ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    at: SocketAddr,
    runtime: Option<Runtime>,
}

/// What comes of a request.
pub type Answer = Result<Response<Body>, std::io::Error>;

impl Server {
    /// Serves a directory, whose folders are the buckets, to whoever has this id and secret.
    ///
    /// # Panics
    /// Where it cannot be served.
    #[must_use]
    pub fn start(root: &Path, key: (&str, &str), threads: usize) -> Server {
        Server::start_with(root, key, threads, |service, request| async move {
            pass(&service, request).await
        })
    }

    /// The same; `answer` has each request, and may [`pass`] it.
    ///
    /// # Panics
    /// Where it cannot be served.
    #[must_use]
    pub fn start_with<F: Future<Output = Answer> + Send + 'static>(
        root: &Path,
        (id, secret): (&str, &str),
        threads: usize,
        answer: impl Fn(S3Service, Request<Incoming>) -> F + Send + Sync + 'static,
    ) -> Server {
        let mut service = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
        service.set_auth(SimpleAuth::from_single(id, secret));
        let (service, answer) = (service.build(), Arc::new(answer));
        let runtime = Builder::new_multi_thread()
            .worker_threads(threads)
            .enable_all()
            .build()
            .unwrap();
        let (tell, told) = mpsc::channel();
        let _detached = runtime.spawn(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            tell.send(listener.local_addr().unwrap()).unwrap();
            while let Ok((socket, _)) = listener.accept().await {
                let (service, answer) = (service.clone(), Arc::clone(&answer));
                let _detached = tokio::spawn(serve(socket, move |request| {
                    answer(service.clone(), request)
                }));
            }
        });
        Server {
            at: told.recv().unwrap(),
            runtime: Some(runtime),
        }
    }

    /// Where it listens, as clients name it.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.at)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve<F: Future<Output = Answer>>(
    socket: TcpStream,
    answer: impl Fn(Request<Incoming>) -> F,
) {
    // Or else the end of each answer may wait for the client.
    let _slower = socket.set_nodelay(true);
    let connection = hyper::server::conn::http1::Builder::new();
    let served = connection.serve_connection(TokioIo::new(socket), service_fn(answer));
    let _ended = served.await;
}

/// Has a request answered by the store.
///
/// # Errors
/// What the store could not say as an answer.
pub async fn pass(service: &S3Service, request: Request<Incoming>) -> Answer {
    let answer = service.call(request.map(Body::from)).await;
    answer.map_err(|error| std::io::Error::other(format!("{error:?}")))
}
