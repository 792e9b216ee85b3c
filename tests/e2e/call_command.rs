//! `smart-router call` with agents that fail, and with media processes.

use std::{net::SocketAddr, process::Output};

use futures_util::{SinkExt, StreamExt};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_tungstenite::{
    accept_hdr_async,
    tungstenite::{
        handshake::server::{Request, Response},
        protocol::{CloseFrame, frame::coding::CloseCode},
    },
};

use testkit::{Router, program, redis::RedisServer};

const SECRET: &str = "connect-secret-0123456789";

/// How an agent treats a connection.
#[derive(Clone, Copy, PartialEq)]
enum Conduct {
    /// Closes it without an answer to the handshake.
    Refuse,
    /// Closes the stream with an error at the first audio.
    Fail,
    /// Returns the audio.
    Echo,
}

/// Serves pods with one address: the first connections as given, further ones like the last of them.
async fn serve(conduct: &'static [Conduct]) -> (SocketAddr, mpsc::UnboundedReceiver<Request>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, requests) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut count = 0;
        while let Ok((connection, _)) = listener.accept().await {
            let conduct = conduct[count.min(conduct.len() - 1)];
            count += 1;
            if conduct != Conduct::Refuse {
                tokio::spawn(stream(connection, conduct, sender.clone()));
            }
        }
    });
    (address, requests)
}

async fn stream(
    connection: TcpStream,
    conduct: Conduct,
    requests: mpsc::UnboundedSender<Request>,
) -> Option<()> {
    #[expect(clippy::result_large_err, reason = "the signature is tungstenite's")]
    let accept = |request: &Request, response: Response| {
        let _ = requests.send(request.clone());
        Ok(response)
    };
    let mut socket = accept_hdr_async(connection, accept).await.ok()?;
    loop {
        let message = socket.next().await?.ok()?;
        match conduct {
            _ if !message.is_binary() => {}
            Conduct::Fail => {
                let frame = CloseFrame { code: CloseCode::Error, reason: "".into() };
                return socket.close(Some(frame)).await.ok();
            }
            _ => socket.send(message).await.ok()?,
        }
    }
}

/// A router with exclusive pods at one address.
fn router_with(pods: &[&str], address: SocketAddr, settings: &[(&str, &str)]) -> Router {
    let list: Vec<_> = pods.iter().map(|pod| format!("{pod}={address}")).collect();
    let (list, tiers) = (list.join(","), format!(r#"{{"gold": {}}}"#, pods.len()));
    let mut all = vec![("PODS", list.as_str()), ("TIER_CONFIG", tiers.as_str())];
    all.extend(settings);
    Router::start(&all)
}

/// Runs `smart-router call` with Vonage's messages, whose audio is binary.
async fn call(router: &Router, args: &[&str]) -> Output {
    let mut command = program(&[]);
    command.args(["call", "--provider", "vonage", "--talk", "200ms"]).args(args);
    command.args(["--router", &format!("http://{}", router.address)]);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The pod that the call got first, and the other one.
fn pods_of(printed: &str) -> (&str, &str) {
    let first = printed.lines().find_map(|line| line.strip_suffix(')')?.split_once(" from "));
    match first.expect("the pod of the call").0.trim() {
        "one" => ("one", "two"),
        _ => ("two", "one"),
    }
}

#[tokio::test]
async fn the_call_command_names_the_pod_that_serves_after_a_failed_connection() {
    let (address, _requests) = serve(&[Conduct::Refuse, Conduct::Echo]).await;
    let router = router_with(&["one", "two"], address, &[]);
    let output = call(&router, &[]).await;
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}{}", text(&output.stderr));
    let (failed, serving) = pods_of(&printed);
    for part in [
        format!("   {failed} failed: the agent closed the connection before it answered"),
        format!("   {serving} from pool:gold serves the call"),
        format!("the call has ended and {serving} is free again"),
    ] {
        assert!(printed.contains(&part), "{part} is not in\n{printed}");
    }
    assert_eq!(printed.matches(" failed: ").count(), 1, "{printed}");
}

#[tokio::test]
async fn the_call_command_names_the_pod_that_serves_after_a_failover() {
    let (address, _requests) = serve(&[Conduct::Fail, Conduct::Echo]).await;
    let router = router_with(&["one", "two"], address, &[]);
    let output = call(&router, &[]).await;
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    let (failed, serving) = pods_of(&printed);
    for part in [
        format!("   {failed} failed: the stream was lost: closed with 1011"),
        format!("   {serving} from pool:gold serves the call"),
        format!("the call has ended and {serving} is free again"),
    ] {
        assert!(printed.contains(&part), "{part} is not in\n{printed}");
    }
    // The audio of the failed pod is lost.
    assert_eq!(output.status.code(), Some(1), "{printed}{errors}");
    assert!(errors.contains(&format!("is {serving} an agent that echoes?")), "{errors}");
}

/// The router tries for 5 s.
#[tokio::test]
async fn the_call_command_waits_for_the_refusal_and_says_why_pods_failed() {
    let (address, _requests) = serve(&[Conduct::Refuse]).await;
    let router = router_with(&["one"], address, &[]);
    let output = call(&router, &[]).await;
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{printed}{errors}");
    assert!(errors.contains("refused the stream: status 502"), "{errors}");
    let failure = "   one failed: the agent closed the connection before it answered";
    assert!(printed.contains(failure), "{printed}");
}

#[tokio::test]
async fn the_call_command_connects_to_a_media_process_with_parameters() {
    let redis = RedisServer::start(&[]);
    let (address, mut requests) = serve(&[Conduct::Echo]).await;
    let settings = [("REDIS_URL", &*redis.url()), ("CONNECT_SECRET", SECRET)];
    let router = router_with(&["one"], address, &settings);
    let media = Router::start_media(&settings);
    let url = format!("http://{}", media.address);
    let connect = ["--connect", "--connect-secret", SECRET];
    let parameters = ["--param", "language=de", "--param", "order=1 & 2"];
    for base in [url.clone(), url.replacen("http", "ws", 1)] {
        let args = [&connect[..], &["--media-url", &base], &parameters].concat();
        let output = call(&router, &args).await;
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{printed}{}", text(&output.stderr));
        assert!(printed.contains(&format!(" to ws://{}/connect/vonage\n", media.address)));
        assert!(printed.contains("one is free again"), "{printed}");
        let request = requests.recv().await.unwrap();
        assert_eq!(request.headers()["x-param-language"], "de");
        assert_eq!(request.headers()["x-param-order"], "1%20&%202");
    }
    for args in [&connect[..], &[]] {
        let output = call(&media, args).await;
        let errors = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let advice = "serves no API: give the router with --router and the media process with \
                      --media-url";
        assert!(errors.contains(advice), "{errors}");
    }
    assert!(requests.try_recv().is_err(), "no stream was opened");
}
